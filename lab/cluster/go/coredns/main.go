// Command coredns answers for the names of Services and pods of the test cluster, and for no others: it has nowhere to ask.
package main

import (
	"github.com/coredns/coredns/core/dnsserver"
	"github.com/coredns/coredns/coremain"

	_ "github.com/coredns/coredns/plugin/errors"
	_ "github.com/coredns/coredns/plugin/health"
	_ "github.com/coredns/coredns/plugin/kubernetes"
	_ "github.com/coredns/coredns/plugin/ready"
	_ "github.com/coredns/coredns/plugin/template"
)

func main() {
	// Plugins run in this order, whatever the configuration's.
	dnsserver.Directives = []string{"errors", "health", "ready", "kubernetes", "template"}
	coremain.Run()
}
