-- Hides a file, so that its content can be deleted; FORGET follows. May be repeated.
--
-- KEYS: file, ends, index of the tenant's files, deleted ones. ARGV: id, ms after which the next try is due.
-- Replies `deleted`, `used` by a batch that has not ended, or nothing if the file is gone.

if redis.call('EXISTS', KEYS[1]) == 0 then
  return ''
end
local due = int(now_ms() + tonumber(ARGV[2]))
-- Also for a file in use: an expired one is looked at again later.
redis.call('ZADD', KEYS[2], due, 'file:' .. ARGV[1])
if tonumber(redis.call('HGET', KEYS[1], 'uses') or 0) > 0 then
  return 'used'
end
redis.call('HSET', KEYS[1], 'state', 'deleted')
leave_index(KEYS[3], KEYS[4], ARGV[1])
return 'deleted'
