// Command netprobe is the image of the cluster's own tests: a server that says its name, a client that asks for it, and
// something slow for a preStop hook to call.
//
//	netprobe serve ADDRESS NAME       answer every GET with NAME; end in good order at SIGTERM
//	netprobe get URL TIMEOUT          print the answer's body; exit 1 where there is none in time
//	netprobe write PATH TEXT DELAY    wait, then write a file
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/signal"
	"syscall"
	"time"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "netprobe:", err)
		os.Exit(1)
	}
}

func run(arguments []string) error {
	switch {
	case len(arguments) == 3 && arguments[0] == "serve":
		return serve(arguments[1], arguments[2])
	case len(arguments) == 3 && arguments[0] == "get":
		return get(arguments[1], arguments[2])
	case len(arguments) == 4 && arguments[0] == "write":
		return write(arguments[1], arguments[2], arguments[3])
	}
	return errors.New("usage: netprobe serve ADDRESS NAME | get URL TIMEOUT | write PATH TEXT DELAY")
}

func serve(address, name string) error {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	handler := http.HandlerFunc(func(answer http.ResponseWriter, request *http.Request) {
		fmt.Printf("asked by %s for %s\n", request.RemoteAddr, request.URL.Path)
		fmt.Fprintln(answer, name)
	})
	server := &http.Server{Addr: address, Handler: handler, ReadHeaderTimeout: 10 * time.Second}
	failed := make(chan error, 1)
	go func() { failed <- server.ListenAndServe() }()
	fmt.Printf("%s serves on %s\n", name, address)
	select {
	case err := <-failed:
		return err
	case <-ctx.Done():
		fmt.Printf("%s ends\n", name)
		return nil
	}
}

func get(url, timeout string) error {
	limit, err := time.ParseDuration(timeout)
	if err != nil {
		return err
	}
	client := http.Client{Timeout: limit}
	answer, err := client.Get(url)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	_, err = io.Copy(os.Stdout, answer.Body)
	return err
}

func write(path, text, delay string) error {
	wait, err := time.ParseDuration(delay)
	if err != nil {
		return err
	}
	time.Sleep(wait)
	return os.WriteFile(path, []byte(text), 0o644)
}
