-- Makes a reserved file visible: its content is complete in the storage. May be repeated.
--
-- KEYS: file, ends, index of the tenant's files. ARGV: id, ms until it expires, most files of the
-- tenant, then fields and values.
-- Replies `published`, `full` at the tenant's limit, or nothing if the file is gone.

local state = redis.call('HGET', KEYS[1], 'state')
if state == 'published' then
  return state
end
if state ~= 'reserved' then
  return ''
end
if redis.call('ZCARD', KEYS[3]) >= tonumber(ARGV[3]) then
  return 'full'
end
local now = now_ms()
local expires = now + tonumber(ARGV[2])
redis.call('HSET', KEYS[1], 'state', 'published', 'created_ms', int(now), 'expires_ms', int(expires))
set_fields(KEYS[1], 4)
redis.call('ZADD', KEYS[3], int(now), ARGV[1])
redis.call('ZADD', KEYS[2], int(expires), 'file:' .. ARGV[1])
return 'published'
