package main

import (
	"fmt"
	"runtime"
	"runtime/debug"

	"github.com/spf13/cobra"
)

// version says which build this is. Fields that the build did not record are empty.
type version struct {
	Version  string `json:"version"`            // module version, or "devel"
	Revision string `json:"revision,omitempty"` // commit the build was made from
	Modified bool   `json:"modified"`           // built from a tree with uncommitted changes
	Go       string `json:"go"`
	Platform string `json:"platform"` // os/arch
}

func buildVersion() version {
	v := version{Version: "devel", Go: runtime.Version(), Platform: runtime.GOOS + "/" + runtime.GOARCH}
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return v
	}
	if m := info.Main.Version; m != "" && m != "(devel)" {
		v.Version = m
	}
	for _, s := range info.Settings {
		switch s.Key {
		case "vcs.revision":
			v.Revision = s.Value
		case "vcs.modified":
			v.Modified = s.Value == "true"
		}
	}
	return v
}

// String gives one line, for people.
func (v version) String() string {
	s := "holdfast " + v.Version
	if v.Revision != "" {
		s += " (" + v.Revision[:min(12, len(v.Revision))]
		if v.Modified {
			s += ", modified"
		}
		s += ")"
	}
	return s + " " + v.Go + " " + v.Platform
}

func newVersionCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "version",
		Short: "Say which build this is",
		Long: `Version names the release or the commit that this build is made from, the Go
version and the platform.

Exit status:
  0    done
  2    an argument is wrong`,
		Example: `  holdfast version
  holdfast version --json`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			v := buildVersion()
			if wantsJSON(c) {
				return writeJSON(c.OutOrStdout(), v)
			}
			_, err := fmt.Fprintln(c.OutOrStdout(), v)
			return err
		},
	}
}
