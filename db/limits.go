package db

// The limits of identities, sequences and publications. They are part of the interface: a request over one of them is
// refused at the edge, before any I/O. A text that is too long is ErrInvalid like any other text that is not allowed
// there; a number or a count that is too large is ErrTooLarge; either message names the field, the value and the limit.

// Limits of an Identity. Texts are counted in bytes of UTF-8.
const (
	// MaxModelBytes bounds Identity.Model, which is not empty.
	MaxModelBytes = 1024
	// MaxRevisionBytes bounds Identity.Weights, which is not empty, Identity.Draft and Identity.Adapter. Only a revision
	// that is marked as unversioned comes near it.
	MaxRevisionBytes = 1024
	// MaxTokenizerBytes bounds Identity.Tokenizer, which is not empty.
	MaxTokenizerBytes = 1024
	// MaxEngineBytes bounds Identity.Engine, which is not empty.
	MaxEngineBytes = 1024
	// MaxDTypeBytes bounds Identity.DType, which is not empty.
	MaxDTypeBytes = 256
	// MaxParallelBytes bounds Identity.Parallel.
	MaxParallelBytes = 1024
	// MaxTenantBytes bounds Identity.Tenant.
	MaxTenantBytes = 256
	// MaxSettings bounds the number of entries of Identity.Settings.
	MaxSettings = 256
	// MaxSettingKeyBytes bounds a key of Identity.Settings, which is not empty.
	MaxSettingKeyBytes = 256
	// MaxSettingValueBytes bounds a value of Identity.Settings.
	MaxSettingValueBytes = 4096
	// MaxNamespaceBytes bounds the canonical encoding of an identity; it follows from the other limits.
	MaxNamespaceBytes = namespaceHeaderBytes +
		4 + MaxModelBytes +
		3*(4+MaxRevisionBytes) +
		4 + MaxTokenizerBytes +
		4 + MaxEngineBytes +
		4 + MaxDTypeBytes +
		4 + MaxParallelBytes +
		4 + MaxTenantBytes +
		4 + MaxSettings*(4+MaxSettingKeyBytes+4+MaxSettingValueBytes) +
		4 + 4 + MaxGroups*(4+MaxGroupNameBytes+1+8+8+8+4)
)

// Limits of a Layout.
const (
	// MaxRanks bounds Layout.Ranks, which is at least 1.
	MaxRanks = 1024
	// MaxGroups bounds the number of groups of a Layout, which has at least 1.
	MaxGroups = 4096
	// MaxGroupNameBytes bounds Group.Name, which is not empty.
	MaxGroupNameBytes = 256
	// MaxPageBytes bounds Group.PageBytes, which is at least 1.
	MaxPageBytes = 1 << 30
	// MaxPageTokens bounds Group.PageTokens of an attention group, which is at least 1.
	MaxPageTokens = 1 << 16
	// MaxWindowTokens bounds Group.WindowTokens of an attention group.
	MaxWindowTokens = MaxSequenceTokens
	// MaxGroupPages bounds Group.Pages of a recurrent or auxiliary group, which is at least 1.
	MaxGroupPages = 1 << 16
)

// Limits of a Sequence.
const (
	// MaxSequenceTokens bounds the tokens of a Sequence, and so every offset.
	MaxSequenceTokens = 1 << 30
	// MaxToken is the largest token value; the smallest is 0.
	MaxToken = 1<<31 - 1
)

// Limits of a publication.
const (
	// MaxRequestBytes bounds the id of the serving request that a publication names.
	MaxRequestBytes = 256
	// MaxMetaBytes bounds the engine's own bytes that a publication carries.
	MaxMetaBytes = 64 << 10
	// MaxCheckpointPages bounds the pages of one rank of a checkpoint.
	MaxCheckpointPages = 1 << 20
	// MaxListedPages bounds the pages of a group that is not full attention at one checkpoint.
	MaxListedPages = 1 << 16
	// MaxPublicationCopies bounds the new pages of a publication, every rank's copy counted, so that its record fits the log.
	// A longer prompt is published in steps.
	MaxPublicationCopies = 1 << 18
	// MaxPosition bounds the logical position of a page.
	MaxPosition = 1 << 40
)

// Limits of a database handle.
const (
	// MaxPending bounds the publications that have begun and not ended.
	MaxPending = 1024
	// MaxLeases bounds the restorations that are held.
	MaxLeases = 4096
	// MaxOwners bounds the owners that are registered.
	MaxOwners = 1024
	// MaxLooseKeyBytes bounds the key of a loose page.
	MaxLooseKeyBytes = 1024
	// MaxLooseBatch bounds the loose pages of one call.
	MaxLooseBatch = 1 << 14
	// MaxQuarantine bounds the lost pages that are remembered until they are published again.
	MaxQuarantine = 1 << 16
)
