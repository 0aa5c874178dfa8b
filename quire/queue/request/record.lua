-- The lists of the fields of a record: `python -m quire.record` makes this file; do not edit it.
--
-- RECORD_FIELDS: all that are not large. LETTER_FIELDS: those that a dead letter has. END_FIELDS:
-- deleted at the end. DELETED_FIELDS, TOKEN_FIELDS: deleted by a requeue, and by one without the
-- tokens. INITIAL_FIELDS: names and values of a new record. FIELD_FORMS: a line for each field that
-- CONDEMN checks, with its form and in quotes what replaces a value that cannot be read, `now` for
-- the time, or nothing if it is deleted.

local RECORD_FIELDS = { 'state', 'priority', 'tenant', 'epoch', 'owner', 'attempts', 'resumes',
  'published', 'deadline_ms', 'submitted_ms', 'claimed_ms', 'first_token_ms', 'finished_ms',
  'asked', 'cancel', 'prefix', 'worker', 'resumed_from', 'losses', 'fingerprint', 'arrival',
  'released', 'answer', 'answer_limit', 'fair', 'rate', 'session', 'turn', 'due_ms', 'kept_ms',
  'activity' }
local LETTER_FIELDS = { 'priority', 'tenant', 'attempts', 'deadline_ms', 'submitted_ms', 'asked',
  'metadata', 'answer_limit', 'session' }
local END_FIELDS = { 'metadata', 'fair', 'rate', 'activity' }
local DELETED_FIELDS = { 'claimed_ms', 'finished_ms', 'cancel', 'worker', 'resumed_from',
  'losses', 'released', 'fair', 'rate', 'due_ms' }
local TOKEN_FIELDS = { 'first_token_ms', 'prefix', 'fingerprint' }
local INITIAL_FIELDS = { 'epoch', '0', 'owner', '', 'attempts', '0', 'resumes', '0', 'published',
  '0' }
local FIELD_FORMS = [[
state state 'queued'
priority priority '1'
tenant tenant 'default'
epoch number '0'
owner owner ''
attempts number '0'
resumes number '0'
published number '0'
deadline_ms number '0'
submitted_ms number 'now'
claimed_ms number
first_token_ms number
finished_ms number
prefix hash
resumed_from number
losses number
arrival moment
answer number
answer_limit number
fair share
rate number
session session
turn moment
due_ms number
kept_ms number
]]
