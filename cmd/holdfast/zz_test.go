package main
import ("testing";"io";"fmt")
func TestZZ(t *testing.T){
	o := defaultReplayOptions(); o.ranks=2; o.limit=3000; o.trace="../../../shared/traces/mooncake_conversation.jsonl"
	s, _ := o.setup(); src,_,_ := o.source(nil)
	c, err := compare(t.Context(), src, s, t.TempDir(), 500, newProgress(io.Discard, false))
	fmt.Println(c, err)
}
