-- Creates a batch, once for its id.
--
-- KEYS: batch, index of the tenant's batches, work, open batches by tenant, input file.
-- ARGV: id, tenant, digest of what was asked, ms until it expires, most open batches of the tenant,
-- most records of the tenant, then fields and values.
-- Replies `created`, `known` if the batch exists and asked the same, `different` if it did not,
-- `full` at a limit, or `no_file`.

local digest = redis.call('HGET', KEYS[1], 'digest')
if digest then
  return digest == ARGV[3] and 'known' or 'different'
end
if redis.call('HGET', KEYS[5], 'state') ~= 'published' then
  return 'no_file'
end
local open = tonumber(redis.call('HGET', KEYS[4], ARGV[2]) or 0)
if open >= tonumber(ARGV[5]) or redis.call('ZCARD', KEYS[2]) >= tonumber(ARGV[6]) then
  return 'full'
end
local now = now_ms()
redis.call('HSET', KEYS[1], 'status', 'validating', 'digest', ARGV[3], 'tenant', ARGV[2],
  'created_ms', int(now), 'expires_ms', int(now + tonumber(ARGV[4])), 'epoch', '0', 'owner', '')
set_fields(KEYS[1], 7)
redis.call('ZADD', KEYS[2], int(now), ARGV[1])
redis.call('ZADD', KEYS[3], int(now), ARGV[1])
redis.call('HINCRBY', KEYS[4], ARGV[2], 1)
redis.call('HINCRBY', KEYS[5], 'uses', 1)
return 'created'
