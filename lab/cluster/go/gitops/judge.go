package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"time"

	"github.com/argoproj/gitops-engine/pkg/diff"
	"github.com/argoproj/gitops-engine/pkg/health"
	kstatus "github.com/fluxcd/cli-utils/pkg/kstatus/status"
	lua "github.com/yuin/gopher-lua"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

// luaLimit is how long Argo CD lets a script run.
const luaLimit = time.Second

// question is one object as Git has it and as the cluster has it, and the script that judges its health, if any.
type question struct {
	Target *unstructured.Unstructured `json:"target"`
	Live   *unstructured.Unstructured `json:"live"`
	Lua    string                     `json:"lua"`
}

// answer is what Argo CD shows of it, and the status that kstatus gives, by which Flux waits.
type answer struct {
	Synced  bool            `json:"synced"`
	Health  string          `json:"health"`
	Message string          `json:"message"`
	Flux    string          `json:"flux"`
	Before  json.RawMessage `json:"before,omitempty"`
	After   json.RawMessage `json:"after,omitempty"`
}

// answerAll answers a JSON list of questions with a JSON list of answers, by Argo CD's own comparison and Lua interpreter and
// by Flux's kstatus. Without a target nothing is compared.
func answerAll(input io.Reader, output io.Writer) error {
	var questions []question
	if err := json.NewDecoder(input).Decode(&questions); err != nil {
		return fmt.Errorf("questions: %w", err)
	}
	answers := make([]answer, 0, len(questions))
	for number, each := range questions {
		told, err := judge(each)
		if err != nil {
			return fmt.Errorf("question %d: %w", number, err)
		}
		answers = append(answers, told)
	}
	return json.NewEncoder(output).Encode(answers)
}

func judge(asked question) (answer, error) {
	told := answer{Synced: true}
	if asked.Target != nil {
		compared, err := diff.Diff(asked.Target, asked.Live)
		if err != nil {
			return told, err
		}
		if compared.Modified {
			told.Synced, told.Before, told.After = false, compared.NormalizedLive, compared.PredictedLive
		}
	}
	if asked.Live == nil {
		told.Health = string(health.HealthStatusMissing)
		return told, nil
	}
	waited, err := kstatus.Compute(asked.Live)
	if err != nil {
		return told, err
	}
	told.Flux = waited.Status.String()
	status, err := health.GetResourceHealth(asked.Live, script(asked.Lua))
	if err != nil {
		return told, err
	}
	if status != nil {
		told.Health, told.Message = string(status.Status), status.Message
	}
	return told, nil
}

// script is a health check of the kind that resource.customizations.health holds. It sees obj and what Argo CD opens when
// useOpenLibs is off: the base library and tables; no strings, no files.
type script string

func (code script) GetResourceHealth(live *unstructured.Unstructured) (*health.HealthStatus, error) {
	if code == "" {
		return nil, nil
	}
	state := lua.NewState(lua.Options{SkipOpenLibs: true})
	defer state.Close()
	for _, each := range []struct {
		name string
		open lua.LGFunction
	}{{lua.LoadLibName, lua.OpenPackage}, {lua.BaseLibName, lua.OpenBase}, {lua.TabLibName, lua.OpenTable}} {
		call := lua.P{Fn: state.NewFunction(each.open), Protect: true}
		if err := state.CallByParam(call, lua.LString(each.name)); err != nil {
			return nil, err
		}
	}
	limit, cancel := context.WithTimeout(context.Background(), luaLimit)
	defer cancel()
	state.SetContext(limit)
	state.SetGlobal("obj", value(state, live.Object))
	if err := state.DoString(string(code)); err != nil {
		return nil, err
	}
	table, is := state.Get(-1).(*lua.LTable)
	if !is {
		return nil, errors.New("the script returned no table")
	}
	status := health.HealthStatusCode(lua.LVAsString(table.RawGetString("status")))
	switch status {
	case health.HealthStatusHealthy, health.HealthStatusProgressing, health.HealthStatusDegraded,
		health.HealthStatusSuspended, health.HealthStatusMissing, health.HealthStatusUnknown:
	default:
		return nil, fmt.Errorf("the script returned the status %q, which Argo CD does not know", status)
	}
	return &health.HealthStatus{Status: status, Message: lua.LVAsString(table.RawGetString("message"))}, nil
}

// value is a decoded JSON value as Lua has it.
func value(state *lua.LState, from any) lua.LValue {
	switch from := from.(type) {
	case bool:
		return lua.LBool(from)
	case string:
		return lua.LString(from)
	case int64:
		return lua.LNumber(from)
	case float64:
		if math.IsNaN(from) {
			return lua.LNil
		}
		return lua.LNumber(from)
	case []any:
		table := state.CreateTable(len(from), 0)
		for _, each := range from {
			table.Append(value(state, each))
		}
		return table
	case map[string]any:
		table := state.CreateTable(0, len(from))
		for name, each := range from {
			table.RawSetString(name, value(state, each))
		}
		return table
	}
	return lua.LNil
}

func runJudge() {
	if err := answerAll(os.Stdin, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "judge:", err)
		os.Exit(1)
	}
}
