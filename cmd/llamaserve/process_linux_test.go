package main

import (
	"os/exec"
	"syscall"
)

// dieWithParent has the kernel kill the child when the test ends, however it ends.
func dieWithParent(cmd *exec.Cmd) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
}
