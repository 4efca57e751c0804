package segment

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	"golang.org/x/sys/unix"
)

// OS is the operating system's file system, for those who wrap it.
func OS() FS { return osFS{} }

// osFS is the operating system's file system.
type osFS struct{}

func (osFS) Mkdir(dir string) error {
	err := os.Mkdir(dir, 0o700)
	if errors.Is(err, fs.ErrExist) {
		return nil
	}
	if err != nil {
		return err
	}
	return osFS{}.SyncDir(filepath.Dir(dir))
}

func (osFS) List(dir string) ([]Listed, error) {
	names, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	list := make([]Listed, 0, len(names))
	for _, n := range names {
		info, err := n.Info()
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		list = append(list, listed(info))
	}
	return list, nil
}

func listed(info fs.FileInfo) Listed {
	l := Listed{Name: info.Name(), Regular: info.Mode().IsRegular(), Size: info.Size(), Allocated: info.Size()}
	if st, ok := info.Sys().(*syscall.Stat_t); ok {
		l.Allocated = int64(st.Blocks) * 512
	}
	return l
}

func (osFS) Create(path string, direct bool) (File, error) {
	return openFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, direct)
}

func (osFS) Open(path string, write, direct bool) (File, error) {
	flags := os.O_RDONLY
	if write {
		flags = os.O_RDWR
	}
	// A pipe in place of the file would block the open; whatever it is, it is not read.
	f, err := openFile(path, flags|unix.O_NONBLOCK, direct)
	if err != nil {
		return nil, err
	}
	l, err := f.Stat()
	if err == nil && !l.Regular {
		err = &os.PathError{Op: "open", Path: path, Err: errIrregular}
	}
	if err != nil {
		_ = f.Close()
		return nil, err
	}
	return f, nil
}

func (osFS) Remove(path string) error { return os.Remove(path) }

func (osFS) SyncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	err = d.Sync()
	return errors.Join(err, d.Close())
}

// osFile is an open file of the operating system.
type osFile struct {
	*os.File
	direct bool
}

// openFile opens without following a link, direct if the file system takes it.
func openFile(path string, flags int, direct bool) (*osFile, error) {
	flags |= unix.O_NOFOLLOW
	if direct && directFlag != 0 {
		f, err := os.OpenFile(path, flags|directFlag, 0o600)
		if !errors.Is(err, unix.EINVAL) {
			if err != nil {
				return nil, err
			}
			return &osFile{f, directFits(f)}, nil
		}
		// Some file systems refuse the flag after they have created the file.
		flags &^= os.O_EXCL
	}
	f, err := os.OpenFile(path, flags, 0o600)
	if err != nil {
		return nil, err
	}
	return &osFile{f, false}, nil
}

func (f *osFile) Direct() bool { return f.direct }

func (f *osFile) Stat() (Listed, error) {
	info, err := f.File.Stat()
	if err != nil {
		return Listed{}, err
	}
	return listed(info), nil
}

func (f *osFile) fail(op string, err error) error {
	if err == nil {
		return nil
	}
	return &os.PathError{Op: op, Path: f.Name(), Err: err}
}
