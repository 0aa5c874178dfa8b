-- SUBMIT: enqueue a request once, however often this is called.
--
-- KEYS  1 record, 2 body, 3..6 ingress by priority, [7 idempotency key, [8 record of its holder]]
-- ARGV  id, priority, tenant, deadline or 0, metadata or '', body, id of the holder or ''
-- Returns {outcome, id, state}: created | known | full, or `held` with the id under the idempotency
-- key, whose record the caller must then declare as KEYS[8] and call again.

local id, priority, tenant = ARGV[FIRST], ARGV[FIRST + 1], ARGV[FIRST + 2]
local deadline, metadata = tonumber(ARGV[FIRST + 3]), ARGV[FIRST + 4]
local body, holder = ARGV[FIRST + 5], ARGV[FIRST + 6]
local record_key, body_key, idempotency_key, holder_key = KEYS[1], KEYS[2], KEYS[7], KEYS[8]

local state = redis.call('HGET', record_key, 'state')
if state then
  return { 'known', id, state }
end

if idempotency_key then
  local held = redis.call('GET', idempotency_key)
  if held and held ~= id then
    if held ~= holder then
      return { 'held', held, '' }
    end
    local held_state = redis.call('HGET', holder_key, 'state')
    if held_state then
      return { 'known', held, held_state }
    end
    -- The holder is forgotten, so its key is free again.
  end
end

if MAX_BACKLOG > 0 then
  local waiting = 0
  for index = 3, 6 do
    waiting = waiting + redis.call('XLEN', KEYS[index])
  end
  if waiting >= MAX_BACKLOG then
    return { 'full', id, '' }
  end
end

local now = now_ms()
local wait = MAX_QUEUE_MS
if deadline > 0 then
  wait = math.max(0, math.min(wait, deadline - now))
end
redis.call('HSET', record_key, 'state', 'queued', 'epoch', '0', 'owner', '', 'published', '0',
  'attempts', '0', 'resumes', '0', 'priority', priority, 'tenant', tenant,
  'deadline_ms', int(deadline), 'submitted_ms', int(now), 'queue_until_ms', int(now + MAX_QUEUE_MS))
if metadata ~= '' then
  redis.call('HSET', record_key, 'metadata', metadata)
end
redis.call('PEXPIRE', record_key, int(wait + RETENTION_MS))
redis.call('SET', body_key, body, 'PX', int(wait + RETENTION_MS))
if idempotency_key then
  redis.call('SET', idempotency_key, id, 'PX', int(SPAN_MS))
end
redis.call('XADD', KEYS[3 + tonumber(priority)], '*', 'id', id)
return { 'created', id, 'queued' }
