-- Asks for the end of a batch. Its batcher, or the next one, ends it. May be repeated.
--
-- KEYS: batch. Replies the status, or nothing if there is no batch.

local status = redis.call('HGET', KEYS[1], 'status')
if not status then
  return ''
end
if OPEN[status] and status ~= 'cancelling' then
  status = 'cancelling'
  redis.call('HSET', KEYS[1], 'status', status, 'cancelling_ms', int(now_ms()))
end
return status
