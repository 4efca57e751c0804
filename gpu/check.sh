#!/bin/sh
# One run on a machine with an NVIDIA GPU: what the driver is and can do, the conformance suite on the device, memory of
# another process, a sweep of sizes and counts against bare copies, and a checkpoint of 2 GiB both ways. It takes less
# than four minutes and prints one table, the one of docs/gpu.md.
#
#   gpu/check.sh              build the tests here (Go and a C compiler are needed) and run them
#   gpu/check.sh build FILE   build them only, into FILE, for a machine that has neither
#   gpu/check.sh run FILE     run what was built so; no device program, header or library of CUDA but the driver is needed
#
# Exit status: 0 if everything passed, 1 if something failed, 2 if there is no usable GPU.
set -eu

build() { (cd "$(dirname "$0")" && CGO_ENABLED=1 go test -c -o "$1" .); }

run() {
	log=$(mktemp)
	trap 'rm -f "$log"' EXIT
	# TestDeviceABI is skipped exactly if there is no driver that can be used.
	"$1" -test.v -test.run '^TestDeviceABI$' >"$log" 2>&1 || { cat "$log"; exit 1; }
	if grep -q -e '--- SKIP' "$log"; then
		grep 'no GPU' "$log"
		exit 2
	fi
	grep 'device\|kernel' "$log"
	HOLDFAST_GPU_SWEEP=1 timeout 220 "$1" -test.v -test.timeout 210s -test.run '^TestDevice(MethodsAreExact|Import|Blocks|Checkpoint|Sweep)$|^TestConformance/^cuda$' >"$log" 2>&1 || {
		cat "$log"
		exit 1
	}
	echo
	grep -e '^--- ' "$log"
	grep -v -e '^=== ' -e '^ *--- ' -e '^PASS' -e '^ *[a-z_]*_test.go' "$log"
}

case "${1:-}" in
build) build "$(realpath "$2")" ;;
run) run "$(realpath "$2")" ;;
"")
	dir=$(mktemp -d)
	build "$dir/gpu.test"
	(run "$dir/gpu.test") && status=0 || status=$?
	rm -rf "$dir"
	exit "$status"
	;;
*)
	sed -n '2,10s/^# \{0,1\}//p' "$0"
	exit 1
	;;
esac
