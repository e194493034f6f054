// Command gang is the cluster's scheduler with the plugin coscheduling, which places the pods of a group together or not at all.
package main

import (
	"os"

	"k8s.io/component-base/cli"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	"sigs.k8s.io/scheduler-plugins/pkg/coscheduling"

	// Its arguments in the scheduler's configuration.
	_ "sigs.k8s.io/scheduler-plugins/apis/config/scheme"
)

func main() {
	os.Exit(cli.Run(scheduler.NewSchedulerCommand(scheduler.WithPlugin(coscheduling.Name, coscheduling.New))))
}
