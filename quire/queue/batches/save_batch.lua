-- Renews the lease of a batch and stores how far it is. Only for the claim that holds it.
--
-- KEYS: batch, work. ARGV: id, epoch, owner, lease in ms (0 gives the batch back), new status or
-- empty, then fields and values.
-- Replies the status, or nothing if the claim does not hold the batch.

if not holds(KEYS[1], ARGV[2], ARGV[3]) then
  return ''
end
local now = now_ms()
set_fields(KEYS[1], 6)
local status = redis.call('HGET', KEYS[1], 'status')
-- A cancellation stays: what the batcher was about to do next does not replace it.
if ARGV[5] ~= '' and status ~= 'cancelling' and status ~= ARGV[5] then
  status = ARGV[5]
  redis.call('HSET', KEYS[1], 'status', status, status .. '_ms', int(now))
end
redis.call('ZADD', KEYS[2], int(now + tonumber(ARGV[4])), ARGV[1])
if tonumber(ARGV[4]) == 0 then
  redis.call('HSET', KEYS[1], 'owner', '')
end
return status
