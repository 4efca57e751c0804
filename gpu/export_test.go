//go:build cgo && linux

package gpu

import (
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/holdfast-db/holdfast/gpu/internal/driver"
)

const exportedBytes = 64 << 10

// exportedByte is what byte i of the exported memory is.
func exportedByte(i int) byte { return byte(i % 251) }

// exportMain is what this binary does as the process that exports device memory: it prints the IPC handle of one
// allocation, passes the descriptor of another through the socket that it got as descriptor 3, and waits to be killed.
func exportMain(library string) {
	die := func(err error) {
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
	d, err := driver.Load(library)
	die(err)
	devices, err := d.Devices()
	die(err)
	ctx, err := d.Retain(devices[0])
	die(err)
	content := make([]byte, exportedBytes)
	for i := range content {
		content[i] = exportedByte(i)
	}
	address, err := ctx.Alloc(exportedBytes)
	die(err)
	die(ctx.Copy(int(Load), address, content))
	handle, err := ctx.IPCExport(address)
	die(err)
	m, fd, err := ctx.FDCreate(exportedBytes)
	die(err)
	die(ctx.Copy(int(Load), m.Device, content))
	die(unix.Sendmsg(3, []byte{1}, unix.UnixRights(fd), nil, 0))
	fmt.Printf("%x %d\n", handle, m.Bytes)
	_, _ = io.ReadAll(os.Stdin)
	os.Exit(0)
}

// exporter is a process that exports exportedBytes of device memory of the first device, both ways.
type exporter struct {
	cmd    *exec.Cmd
	handle [64]byte
	file   *os.File
	bytes  int64
}

func startExporter(t *testing.T, library string) *exporter {
	self, err := os.Executable()
	require.NoError(t, err)
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	require.NoError(t, err)
	ours, theirs := os.NewFile(uintptr(pair[0]), "ours"), os.NewFile(uintptr(pair[1]), "theirs")
	x := &exporter{cmd: exec.Command(self)}
	x.cmd.Env = append(os.Environ(), "HOLDFAST_GPU_TEST_EXPORT="+library)
	x.cmd.Stderr = os.Stderr
	x.cmd.ExtraFiles = []*os.File{theirs}
	_, err = x.cmd.StdinPipe()
	require.NoError(t, err)
	out, err := x.cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, x.cmd.Start())
	t.Cleanup(x.kill)
	require.NoError(t, theirs.Close())
	var handle []byte
	_, err = fmt.Fscanf(out, "%x %d\n", &handle, &x.bytes)
	require.NoError(t, err)
	copy(x.handle[:], handle)
	x.file = receiveFile(t, ours)
	return x
}

// receiveFile takes a descriptor out of a socket.
func receiveFile(t *testing.T, socket *os.File) *os.File {
	conn, err := net.FileConn(socket)
	require.NoError(t, err)
	defer func() { require.NoError(t, conn.Close()) }()
	require.NoError(t, socket.Close())
	require.NoError(t, conn.SetDeadline(time.Now().Add(patience)))
	rights := make([]byte, unix.CmsgSpace(4))
	_, n, _, _, err := conn.(*net.UnixConn).ReadMsgUnix(make([]byte, 1), rights)
	require.NoError(t, err)
	messages, err := unix.ParseSocketControlMessage(rights[:n])
	require.NoError(t, err)
	require.Len(t, messages, 1)
	fds, err := unix.ParseUnixRights(&messages[0])
	require.NoError(t, err)
	return os.NewFile(uintptr(fds[0]), "exported")
}

func (x *exporter) kill() {
	if x.cmd.ProcessState == nil {
		_ = x.cmd.Process.Kill()
		_ = x.cmd.Wait()
	}
}
