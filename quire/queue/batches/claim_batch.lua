-- Gives a batch that nobody holds to a batcher, with a lease.
--
-- KEYS: batch, work, ends of the queue, control. ARGV: id, owner (fresh 128 bits in hex), lease in ms.
-- Replies the new epoch, or 0 if the batch is held, ended or gone.

-- The reply to the first try was lost.
if redis.call('HGET', KEYS[1], 'owner') == ARGV[2] then
  return tonumber(redis.call('HGET', KEYS[1], 'epoch'))
end
local free_from = redis.call('ZSCORE', KEYS[2], ARGV[1])
local now = now_ms()
if not free_from or tonumber(free_from) > now then
  return 0
end
local status = redis.call('HGET', KEYS[1], 'status')
if not OPEN[status or ''] then
  -- A torn file has ended the batch, and may lack what FINISH_BATCH wrote next.
  if status and not is_batch_told(ARGV[1], KEYS[1], KEYS[3]) then
    tell_batch(ARGV[1], KEYS[1], KEYS[3], KEYS[4])
  end
  redis.call('ZREM', KEYS[2], ARGV[1])
  return 0
end
redis.call('ZADD', KEYS[2], int(now + tonumber(ARGV[3])), ARGV[1])
redis.call('HSET', KEYS[1], 'owner', ARGV[2])
return redis.call('HINCRBY', KEYS[1], 'epoch', 1)
