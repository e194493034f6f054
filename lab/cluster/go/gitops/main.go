// Command gitops holds Helm and what Argo CD and Flux think of objects, in one binary; the name it is called by says which.
package main

import (
	"fmt"
	"os"
	"path/filepath"

	helm "helm.sh/helm/v4/pkg/cmd"
)

func main() {
	switch name := filepath.Base(os.Args[0]); name {
	case "helm":
		runHelm()
	case "judge":
		runJudge()
	default:
		fmt.Fprintf(os.Stderr, "%s: call it through a link named helm or judge\n", name)
		os.Exit(2)
	}
}

// runHelm prints errors the way users know them from helm.
func runHelm() {
	command, err := helm.NewRootCmd(os.Stdout, os.Args[1:], helm.SetupLogging)
	if err == nil {
		err = command.Execute()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "Error:", err)
		os.Exit(1)
	}
}
