-- CANCEL: end a queued request, flag a running one, leave a terminal one alone.
--
-- KEYS  1 record, 2 body, 3 output, 4 lease
-- ARGV  id
-- Returns the state after this, or '' for an unknown request. The ingress entry of a queued request
-- is left for CLAIM to drop: deleting what is undelivered would make the group's lag unknown.

local keys, lease = keys_at(1), KEYS[4]
local record = fields_of(keys, 'state', 'epoch')

if record.state == 'queued' then
  return end_without_worker(keys, ARGV[FIRST], lease, record.epoch, ENDINGS.cancelled, now_ms())
elseif record.state == 'running' then
  redis.call('HSET', keys.record, 'cancel', '1')
end
return record.state or ''
