-- DISCARD: delete what a caller no longer wants to be kept.
--
-- KEYS  record, body and output log of a request that is in no group
-- ARGV  id
-- Returns the state before this, or '' for an unknown request. Of an open request only what is kept
-- is deleted: its books, its worker and its readers need the rest. Call this again after its end.

local state = redis.call('HGET', KEYS[1], 'state')
if not state then
  return ''
end
redis.call('HDEL', KEYS[1], 'kept')
if state ~= 'scheduled' and state ~= 'queued' and state ~= 'running' then
  redis.call('DEL', KEYS[1], KEYS[2], KEYS[3])
end
return state
