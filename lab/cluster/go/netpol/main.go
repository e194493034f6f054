// Command netpol enforces NetworkPolicy on one node: it reads the first packet of every connection from or to a pod from a
// netfilter queue, and passes or drops it as the policies say. The rules that fill the queue are laid by whoever starts it.
package main

import (
	"context"
	"errors"
	"flag"
	"os/signal"
	"syscall"

	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/klog/v2"
	"sigs.k8s.io/kube-network-policies/pkg/networkpolicy"
)

func main() {
	kubeconfig := flag.String("kubeconfig", "", "kubeconfig of a user who may list pods, namespaces and policies")
	node := flag.String("node-name", "", "name of the node whose connections are judged")
	queue := flag.Int("queue", 100, "number of the netfilter queue")
	klog.InitFlags(nil)
	flag.Parse()
	if err := run(*kubeconfig, *node, *queue); err != nil {
		klog.Fatal(err)
	}
}

func run(kubeconfig, node string, queue int) error {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	config, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		return err
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	factory := informers.NewSharedInformerFactory(client, 0)
	// The container runtime here does not tell plugins about pods (NRI). It must not be disabled all the same: an address that is
	// no pod's is looked up in the plugin's table, which does not exist then. Not finding the runtime is logged once.
	options := networkpolicy.Config{NodeName: node, QueueID: queue, NRIdisabled: false}
	controller, err := networkpolicy.NewController(client, factory.Networking().V1().NetworkPolicies(),
		factory.Core().V1().Namespaces(), factory.Core().V1().Pods(), nil, nil, nil, nil, options)
	if err != nil {
		return err
	}
	factory.Start(ctx.Done())
	if err := controller.Run(ctx); err != nil && !errors.Is(err, context.Canceled) {
		return err
	}
	return nil
}
