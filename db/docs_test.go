package db_test

import (
	"bytes"
	"encoding/binary"
	"flag"
	"fmt"
	"go/ast"
	"go/constant"
	"go/parser"
	"go/token"
	"go/types"
	"hash/crc32"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	_ "github.com/cockroachdb/datadriven" // for its flag -rewrite, which all golden files obey
	"github.com/stretchr/testify/require"

	"github.com/holdfast-db/holdfast/db"
)

// These tests hold the documents against the code: what a document says of a limit, a test, a file or a module has to be so.

// root is the repository, seen from this package.
const root = ".."

// document reads a file of the repository.
func document(t *testing.T, name string) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(root, name))
	require.NoError(t, err)
	return string(b)
}

// documents lists the Markdown files of the repository.
func documents(t *testing.T) []string {
	t.Helper()
	var names []string
	for _, pattern := range []string{"*.md", "docs/*.md"} {
		found, err := filepath.Glob(filepath.Join(root, pattern))
		require.NoError(t, err)
		for _, f := range found {
			name, err := filepath.Rel(root, f)
			require.NoError(t, err)
			names = append(names, filepath.ToSlash(name))
		}
	}
	require.Contains(t, names, "README.md")
	require.Contains(t, names, "docs/limits.md")
	return names
}

// goFiles calls fn for every Go file of the module.
func goFiles(t *testing.T, fn func(name string)) {
	t.Helper()
	require.NoError(t, filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name := filepath.ToSlash(path)
		if d.IsDir() && (strings.HasPrefix(d.Name(), ".") && d.Name() != ".." || d.Name() == "testdata") {
			return filepath.SkipDir
		}
		if strings.HasSuffix(name, ".go") {
			fn(strings.TrimPrefix(name, root+"/"))
		}
		return nil
	}))
}

var goBlock = regexp.MustCompile("(?s)```go\n(.*?)```")

// The Go code of the README is code of example_test.go, which is compiled and run.
func TestReadmeExampleIsTested(t *testing.T) {
	source := document(t, "db/example_test.go")
	blocks := goBlock.FindAllStringSubmatch(document(t, "README.md"), -1)
	require.NotEmpty(t, blocks)
	for _, b := range blocks {
		require.Contains(t, source, b[1])
	}
}

// The commands of the README are the ones that .ci/run runs.
func TestReadmeCommandsAreRun(t *testing.T) {
	readme, run := document(t, "README.md"), document(t, ".ci/run")
	for _, command := range []string{"go run ./cmd/holdfast replay", "go test ./..."} {
		require.Contains(t, readme, "\n"+command+"\n")
		require.Contains(t, run, command)
	}
}

var (
	quotedPath = regexp.MustCompile("`((?:\\.ci|cmd|db|docs|fuzz|gpu|recovery|txn|wal)/[A-Za-z0-9_./-]*)`")
	quotedTest = regexp.MustCompile("`(?:[a-z/]+\\.)?((?:Test|Fuzz|Example|Benchmark)[A-Z]\\w*)`")
	link       = regexp.MustCompile(`\]\(([^)#\s]+)(#[^)\s]*)?\)`)
)

// What a document links to or names, a file, a folder or a test, is there.
func TestDocumentsNameWhatIsThere(t *testing.T) {
	known := map[string]bool{} // also without the ids at their end, which change as coverage grows
	for name := range testFunctions(t) {
		known[name] = true
		short, _, _ := strings.Cut(name, "_")
		known[short] = true
	}
	for _, name := range documents(t) {
		text := document(t, name)
		for _, m := range link.FindAllStringSubmatch(text, -1) {
			if strings.Contains(m[1], "://") {
				continue
			}
			if _, err := os.Stat(filepath.Join(root, filepath.Dir(name), m[1])); err != nil {
				t.Errorf("%s links to %s, which is not there: %v", name, m[1], err)
			}
		}
		for _, m := range quotedPath.FindAllStringSubmatch(text, -1) {
			if quotedTest.MatchString(m[0]) {
				continue
			}
			if _, err := os.Stat(filepath.Join(root, m[1])); err != nil {
				t.Errorf("%s names %s, which is not there: %v", name, m[1], err)
			}
		}
		for _, m := range quotedTest.FindAllStringSubmatch(text, -1) {
			if !known[m[1]] {
				t.Errorf("%s names %s, which is not there", name, m[1])
			}
		}
	}
}

// testFunctions gives the tests, fuzz targets, examples and benchmarks of the module, and the packages that they are in.
func testFunctions(t *testing.T) map[string][]string {
	t.Helper()
	declaration := regexp.MustCompile(`(?m)^func ((?:Test|Fuzz|Example|Benchmark)\w+)\(`)
	found := map[string][]string{}
	goFiles(t, func(name string) {
		if !strings.HasSuffix(name, "_test.go") {
			return
		}
		for _, m := range declaration.FindAllStringSubmatch(document(t, name), -1) {
			dir := filepath.ToSlash(filepath.Dir(name))
			if !slices.Contains(found[m[1]], dir) {
				found[m[1]] = append(found[m[1]], dir)
			}
		}
	})
	return found
}

// Every invariant has a section of its own in the guarantees, and the README names it.
func TestInvariantsAreDocumented(t *testing.T) {
	guarantees, readme := document(t, "docs/guarantees.md"), document(t, "README.md")
	names := regexp.MustCompile(`Invariant\s+= "([a-z-]+)"`).FindAllStringSubmatch(document(t, "txn/invariant.go"), -1)
	require.NotEmpty(t, names)
	for _, n := range names {
		require.Contains(t, guarantees, "\n### "+n[1]+"\n")
		require.Contains(t, readme, n[1])
	}
	require.Equal(t, len(names), strings.Count(guarantees, "\n### "), "sections that are no invariant")
}

// limitRow is a row of docs/limits.md: `name` | value | what it bounds.
var limitRow = regexp.MustCompile("(?m)^\\| `(\\w+)` \\| ([^|]+) \\|")

// limitsOf gives the rows of each section of docs/limits.md that is headed by a folder.
func limitsOf(t *testing.T) map[string]map[string]string {
	t.Helper()
	sections := map[string]map[string]string{}
	for _, s := range strings.Split(document(t, "docs/limits.md"), "\n## ")[1:] {
		dir, text, _ := strings.Cut(s, "\n")
		if dir = strings.Trim(dir, "`"); !strings.Contains("db wal txn gpu db/internal/segment db/internal/arena db/internal/index cmd/holdfast", dir) {
			continue
		}
		sections[dir] = map[string]string{}
		for _, m := range limitRow.FindAllStringSubmatch(text, -1) {
			require.NotContains(t, sections[dir], m[1], "twice")
			sections[dir][m[1]] = strings.TrimSpace(m[2])
		}
	}
	return sections
}

// Every limit and default in docs/limits.md has the value that it has in the code, and none of the interface is missing.
func TestLimitsAreDocumented(t *testing.T) {
	documented := limitsOf(t)
	mustList := map[string]*regexp.Regexp{ // constants that an embedding program can meet
		"db":                  regexp.MustCompile(`^(Max|Min|Default)[A-Z]`),
		"wal":                 regexp.MustCompile(`^(Max[A-Z]|[A-Z]\w*(Default|Max|Min)$)`),
		"txn":                 regexp.MustCompile(`^[A-Z]\w*Max$`),
		"db/internal/segment": regexp.MustCompile(`^[A-Z]\w*(Default|Max|Min)$`),
		"db/internal/arena":   regexp.MustCompile(`^[A-Z]\w*Max$`),
	}
	for dir, rows := range documented {
		values := constants(t, dir)
		for name, said := range rows {
			value, ok := values[name]
			if !ok {
				t.Errorf("docs/limits.md: %s has no constant %s", dir, name)
				continue
			}
			if want, err := parseLimit(said); err != nil || want != value {
				t.Errorf("docs/limits.md: %s %s is %q, in the code it is %d (%v)", dir, name, said, value, err)
			}
		}
		for name := range values {
			if mustList[dir] != nil && mustList[dir].MatchString(name) && rows[name] == "" {
				t.Errorf("docs/limits.md: %s has no row for %s = %d", dir, name, values[name])
			}
		}
	}
	for dir := range mustList {
		require.Contains(t, documented, dir)
	}
}

// constants evaluates the integer constants of a package. What they need of other packages is the units of time.
func constants(t *testing.T, dir string) map[string]int64 {
	t.Helper()
	fset := token.NewFileSet()
	var files []*ast.File
	entries, err := os.ReadDir(filepath.Join(root, dir))
	require.NoError(t, err)
	for _, e := range entries {
		if !strings.HasSuffix(e.Name(), ".go") || strings.HasSuffix(e.Name(), "_test.go") {
			continue
		}
		f, err := parser.ParseFile(fset, filepath.Join(root, dir, e.Name()), nil, parser.SkipObjectResolution)
		require.NoError(t, err)
		files = append(files, f)
	}
	conf := types.Config{Importer: onlyTime{}, Error: func(error) {}, IgnoreFuncBodies: true}
	pkg, _ := conf.Check(dir, fset, files, nil) // in part: other packages are not there, and the constants do not need them
	values := map[string]int64{}
	for _, name := range pkg.Scope().Names() {
		if c, ok := pkg.Scope().Lookup(name).(*types.Const); ok && c.Val().Kind() == constant.Int {
			if v, exact := constant.Int64Val(c.Val()); exact {
				values[name] = v
			}
		}
	}
	return values
}

// onlyTime imports the units of time, and nothing of any other package.
type onlyTime struct{}

func (onlyTime) Import(path string) (*types.Package, error) {
	pkg := types.NewPackage(path, filepath.Base(path))
	if path == "time" {
		for name, unit := range map[string]time.Duration{"Millisecond": time.Millisecond, "Second": time.Second, "Minute": time.Minute, "Hour": time.Hour} {
			pkg.Scope().Insert(types.NewConst(token.NoPos, pkg, name, types.Typ[types.UntypedInt], constant.MakeInt64(int64(unit))))
		}
	}
	pkg.MarkComplete()
	return pkg, nil
}

// parseLimit reads 1,024 or 64 KiB or 8 s.
func parseLimit(s string) (int64, error) {
	number, unit, _ := strings.Cut(s, " ")
	v, err := strconv.ParseInt(strings.ReplaceAll(number, ",", ""), 10, 64)
	units := map[string]int64{
		"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40,
		"ms": int64(time.Millisecond), "s": int64(time.Second), "min": int64(time.Minute), "h": int64(time.Hour),
	}
	if u, ok := units[unit]; ok && err == nil {
		return v * u, nil
	}
	return 0, fmt.Errorf("%q: want a number and a unit", s)
}

// Every module that the code imports is in docs/dependencies.md, and nothing else is.
func TestDependenciesAreDocumented(t *testing.T) {
	imports := map[string]bool{}
	goFiles(t, func(name string) {
		f, err := parser.ParseFile(token.NewFileSet(), filepath.Join(root, name), nil, parser.ImportsOnly)
		require.NoError(t, err)
		for _, i := range f.Imports {
			imports[strings.Trim(i.Path.Value, `"`)] = true
		}
	})
	text := document(t, "docs/dependencies.md")
	documented := map[string]bool{}
	for _, m := range regexp.MustCompile("(?m)^\\| `([^`]+)` \\|").FindAllStringSubmatch(text, -1) {
		documented[m[1]] = true
	}
	mod := document(t, "go.mod")
	for _, tool := range regexp.MustCompile(`(?m)^(?:tool |\t)(\S+/cmd/\S+)$`).FindAllStringSubmatch(mod, -1) {
		imports[tool[1]] = true
	}
	for _, m := range regexp.MustCompile(`(?m)^(?:require |\t)([a-z][\w.-]+\.[a-z]+\S*) v`).FindAllStringSubmatch(mod, -1) {
		direct := false
		for i := range imports {
			direct = direct || i == m[1] || strings.HasPrefix(i, m[1]+"/")
		}
		// A module nested in another one, such as otel/metric in otel, is found by the longest path.
		require.Equal(t, direct, documented[m[1]], "%s: imported %t, documented %t", m[1], direct, documented[m[1]])
		delete(documented, m[1])
	}
	require.Empty(t, documented, "documented and not required")
}

var (
	conformanceRow = regexp.MustCompile(`^\| ([A-Z]+-\d\d|B\d\d) \| ([^|]*) \| ([^|]*) \| ([^|]*) \|$`)
	idInName       = regexp.MustCompile(`_([A-Z]{1,3})-?(\d\d)`)
)

// conformanceTests gives the tests and data-driven histories whose names carry an id, by id.
func conformanceTests(t *testing.T) map[string][]string {
	t.Helper()
	byID := map[string][]string{}
	add := func(name, where string) {
		for _, m := range idInName.FindAllStringSubmatch(name, -1) {
			id := m[1] + "-" + m[2]
			if m[1] == "B" {
				id = m[1] + m[2]
			}
			if !slices.Contains(byID[id], where) {
				byID[id] = append(byID[id], where)
			}
		}
	}
	for name, dirs := range testFunctions(t) {
		for _, dir := range dirs {
			add(name, "`"+dir+"."+name+"`")
		}
	}
	files, err := filepath.Glob(filepath.Join(root, "*", "testdata", "*", "*"))
	require.NoError(t, err)
	for _, f := range files {
		name := strings.TrimPrefix(filepath.ToSlash(f), root+"/")
		add(filepath.Base(name), "`"+name+"`")
	}
	for id := range byID {
		slices.Sort(byID[id])
	}
	return byID
}

// Every id of docs/conformance.md has the tests that carry it in their names, or says why it has none. With -rewrite the
// column of the tests is written anew.
func TestConformanceIsDocumented(t *testing.T) {
	const name = "docs/conformance.md"
	tests := conformanceTests(t)
	rewrite := flag.Lookup("rewrite").Value.String() == "true"
	var out bytes.Buffer
	seen := map[string]bool{}
	for line := range strings.Lines(document(t, name)) {
		line = strings.TrimSuffix(line, "\n")
		if m := conformanceRow.FindStringSubmatch(line); m != nil {
			id, what, remark := m[1], m[2], strings.TrimSpace(m[4])
			require.False(t, seen[id], "%s is there twice", id)
			seen[id] = true
			derived := strings.Join(tests[id], ", ")
			if derived == "" && remark == "" && rewrite {
				remark = "open"
			}
			if derived != "" && remark == "open" && rewrite {
				remark = ""
			}
			switch said := strings.TrimSpace(m[3]); {
			case rewrite:
			case said != derived:
				t.Errorf("%s: %s says %q, the tests are %q: run go test ./db -run Conformance -rewrite", name, id, said, derived)
			case derived == "" && remark == "":
				t.Errorf("%s: %s has neither a test nor a reason", name, id)
			case derived != "" && remark == "open":
				t.Errorf("%s: %s has tests and is called open", name, id)
			}
			line = fmt.Sprintf("| %s | %s | %s | %s |", id, what, derived, remark)
		}
		out.WriteString(line + "\n")
	}
	for id, names := range tests {
		if !seen[id] {
			t.Errorf("%v carry %s, which is not in %s", names, id, name)
		}
	}
	if rewrite {
		require.NoError(t, os.WriteFile(filepath.Join(root, name), out.Bytes(), 0o644))
	}
}

// The tables of docs/formats.md that place fields are without gaps, and as long as the code says.
func TestFormatTablesAreWhole(t *testing.T) {
	row := regexp.MustCompile(`^\| (\d+) \| (\d+) \|`)
	var lengths []int
	at, inside := 0, false
	for line := range strings.Lines(document(t, "docs/formats.md")) {
		switch m := row.FindStringSubmatch(line); {
		case strings.HasPrefix(line, "| at | bytes |"):
			at, inside = 0, true
		case m != nil && inside:
			offset, err := strconv.Atoi(m[1])
			require.NoError(t, err)
			require.Equal(t, at, offset, line)
			size, err := strconv.Atoi(m[2])
			require.NoError(t, err)
			at += size
		case inside && !strings.HasPrefix(line, "|"):
			lengths, inside = append(lengths, at), false
		}
	}
	marker, log, segment := constants(t, "db"), constants(t, "wal"), constants(t, "db/internal/segment")
	require.Equal(t, []int{
		int(marker["markerBytes"]), int(log["headerBytes"]),
		int(segment["blockBytes"]), int(segment["prefixBytes"]), int(segment["entryBytes"]),
	}, lengths)
}

// Every kind of record and every kind of entry in the catalogue has a row in docs/formats.md.
func TestRecordsAndEntriesAreDocumented(t *testing.T) {
	text := document(t, "docs/formats.md")
	kinds, tags := 0, 0
	for name, value := range constants(t, "txn") {
		switch {
		case strings.HasPrefix(name, "Kind"):
			kinds++
			require.Contains(t, text, fmt.Sprintf("\n| %d | %s |", value, strings.ToLower(strings.TrimPrefix(name, "Kind"))))
		case strings.HasPrefix(name, "tag"):
			tags++
			require.Contains(t, text, fmt.Sprintf("\n| `%c`", rune(value)), name)
		}
	}
	require.Equal(t, kinds, strings.Count(text[strings.Index(text, "\n## Records"):strings.Index(text, "\n## Catalogue")], "\n| ")-2)
	require.Positive(t, tags)
}

// A new directory has the marker that docs/formats.md draws.
func TestMarkerIsAsDrawn(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "db")
	for epoch := uint64(1); epoch <= 2; epoch++ {
		store, err := db.Open(t.Context(), dir, db.Options{RAMBytes: db.MinRAMBytes})
		require.NoError(t, err)
		_, err = store.Close(t.Context())
		require.NoError(t, err)
		b, err := os.ReadFile(filepath.Join(dir, "HOLDFAST"))
		require.NoError(t, err)
		require.Len(t, b, 64)
		require.Equal(t, "HOLDFAST", string(b[:8]))
		require.Equal(t, uint32(1), binary.LittleEndian.Uint32(b[8:]))
		require.Zero(t, binary.LittleEndian.Uint32(b[12:]))
		require.NotEqual(t, make([]byte, 16), b[16:32])
		require.Equal(t, epoch, binary.LittleEndian.Uint64(b[32:]))
		require.Equal(t, make([]byte, 20), b[40:60])
		require.Equal(t, crc32.Checksum(b[:60], crc32.MakeTable(crc32.Castagnoli)), binary.LittleEndian.Uint32(b[60:]))
	}
}

// Imports point the way that docs/architecture.md draws: down, to txn, and to nothing beside.
func TestImportsPointOneWay(t *testing.T) {
	const module = "github.com/holdfast-db/holdfast/"
	allowed := map[string][]string{
		"txn": {}, "wal": {"txn"}, "recovery": {"txn"}, "gpu": {"txn", "gpu/internal/driver"}, "gpu/internal/driver": {},
		"db/internal/arena": {"txn"}, "db/internal/segment": {"txn"}, "db/internal/index": {"txn"},
		"txn/mutant": {}, // which every package may import: nothing of it is in a program
		"db":         {"db/internal/arena", "db/internal/segment", "db/internal/index", "gpu", "recovery", "txn", "wal"},
	}
	seen := map[string]bool{}
	goFiles(t, func(name string) {
		dir := filepath.ToSlash(filepath.Dir(name))
		if strings.HasSuffix(name, "_test.go") || allowed[dir] == nil {
			return
		}
		seen[dir] = true
		f, err := parser.ParseFile(token.NewFileSet(), filepath.Join(root, name), nil, parser.ImportsOnly)
		require.NoError(t, err)
		for _, i := range f.Imports {
			if ours, ok := strings.CutPrefix(strings.Trim(i.Path.Value, `"`), module); ok && ours != "txn/mutant" && !slices.Contains(allowed[dir], ours) {
				t.Errorf("%s imports %s", name, ours)
			}
		}
	})
	require.Len(t, seen, len(allowed))
}
