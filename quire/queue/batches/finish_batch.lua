-- Ends a batch and publishes its result files, all at once. Only for the claim that holds it.
--
-- KEYS: batch, work, ends, open batches by tenant, input file, index of the tenant's files, output
-- file, error file, ends of the queue, control. ARGV: id, epoch, owner, status, ms for which the batch is kept, ms for which
-- the result files are kept, id of the output file or empty, its bytes, id of the error file or
-- empty, its bytes, then fields and values.
-- Replies the status, or nothing if the claim does not hold the batch.

local before = redis.call('HMGET', KEYS[1], 'epoch', 'status')
if before[1] == ARGV[2] and not OPEN[before[2] or ''] then
  -- The reply to the first try was lost.
  return before[2]
end
if not holds(KEYS[1], ARGV[2], ARGV[3]) then
  return ''
end
local now = now_ms()
local status = ARGV[4]
if redis.call('HGET', KEYS[1], 'status') == 'cancelling' then
  status = 'cancelled'
end
local tenant = redis.call('HGET', KEYS[1], 'tenant')

local function publish(key, id, bytes, name)
  if id == '' then
    return
  end
  local expires = int(now + tonumber(ARGV[6]))
  redis.call('HSET', key, 'state', 'published', 'tenant', tenant, 'purpose', 'batch_output',
    'filename', name, 'bytes', bytes, 'created_ms', int(now), 'expires_ms', expires)
  redis.call('ZADD', KEYS[6], int(now), id)
  redis.call('ZADD', KEYS[3], expires, 'file:' .. id)
end

publish(KEYS[7], ARGV[7], ARGV[8], ARGV[1] .. '_output.jsonl')
publish(KEYS[8], ARGV[9], ARGV[10], ARGV[1] .. '_error.jsonl')
set_fields(KEYS[1], 11)
redis.call('HSET', KEYS[1], 'status', status, status .. '_ms', int(now), 'owner', '',
  'output_file_id', ARGV[7], 'error_file_id', ARGV[9])
tell_batch(ARGV[1], KEYS[1], KEYS[9], KEYS[10])
redis.call('ZREM', KEYS[2], ARGV[1])
redis.call('ZADD', KEYS[3], int(now + tonumber(ARGV[5])), 'batch:' .. ARGV[1])
if redis.call('HINCRBY', KEYS[4], tenant, -1) <= 0 then
  redis.call('HDEL', KEYS[4], tenant)
end
if redis.call('EXISTS', KEYS[5]) == 1 then
  redis.call('HINCRBY', KEYS[5], 'uses', -1)
end
return status
