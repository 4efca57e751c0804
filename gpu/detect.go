package gpu

// Detect gives the CUDA backend where it can be opened, and otherwise the host backend with the reason, which is for people
// to read and no failure.
func Detect(o CUDAOptions) (b Backend, reason error) {
	b, reason = OpenCUDA(o)
	if reason == nil {
		return b, nil
	}
	h, err := NewHost(HostOptions{})
	if err != nil {
		return nil, err // not with options of zero
	}
	return h, reason
}
