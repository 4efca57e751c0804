package main

import (
	"fmt"
	"os"
	"testing"
)

func TestStudy(t *testing.T) {
	if os.Getenv("STUDY") == "" {
		t.Skip()
	}
	for _, w := range []string{"conversation", "synthetic", "generator"} {
		var src source
		if w == "generator" {
			src = generate(1, 8000)
		} else {
			s, c, err := openTrace("../../../shared/traces/mooncake_"+w+".jsonl", nil)
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			src = s
		}
		var requests []request
		for r, err := range src.requests {
			if err != nil {
				t.Fatal(err)
			}
			requests = append(requests, r)
		}
		future := newSimFuture(requests)
		for _, m := range []model{hybridModel, attentionModel} {
			st := setup{Model: m, Ranks: 1, PageBytes: 4 << 10, StateBytes: 64 << 10}
			l := newLedger(st)
			for _, r := range requests {
				l.acknowledge(r)
			}
			base := map[int]float64{}
			for _, o := range simOrders() {
				if o.evict != nil && os.Getenv("S3") == "" {
					continue
				}
				line := fmt.Sprintf("%-12s %-9s %-28s", w, m, o.name)
				for _, pc := range []int{10, 25, 50} {
					s := newSimulation(o, st, l.uniqueBytes()*int64(pc)/100, future)
					for _, r := range requests {
						s.request(r)
					}
					h := 100 * float64(s.hits) / float64(s.asked)
					if o.name == "LRU" {
						base[pc] = h
					}
					line += fmt.Sprintf("  %6.2f (%+5.2f %%)", h, 100*(h/base[pc]-1))
				}
				fmt.Println(line)
			}
		}
	}
}
