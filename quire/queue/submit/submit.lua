-- SUBMIT: enqueue a request once, however often this is called.
--
-- KEYS  those of request.lua with one request, [then idempotency key, [then record of its holder]],
--       then those of the pictures that it names
-- ARGV  id, priority, tenant, deadline or 0, metadata or '', body, id of the holder or '',
--       not before or 0, tokens, what it asks or '', most tokens of the answer or '', session or '',
--       target latency in ms or 0, what is kept with the results or '', and if the message names no
--       length of its answer, the most that its producer allows or 0, else '', number of pictures,
--       tokens for their bytes at the rate of the tenant
-- Returns {outcome, id, state}: created | known | full with the limit in place of the state, `lacks`
-- with the numbers of the pictures that are not stored, from 1, or
-- `held` with the id stored under the idempotency key: the caller then calls again and declares the
-- record of that id. `known` by its own id has a fourth part: the request's stored `asked`, or ''.
-- `full` at a tenant's rate has a fourth part, too: in how many ms the request may be let in.

local id, priority, tenant = ARGV[FIRST], ARGV[FIRST + 1], ARGV[FIRST + 2]
local deadline, metadata = tonumber(ARGV[FIRST + 3]), ARGV[FIRST + 4]
local body, holder = ARGV[FIRST + 5], ARGV[FIRST + 6]
local not_before, tokens = tonumber(ARGV[FIRST + 7]), tonumber(ARGV[FIRST + 8])
-- Opaque; a producer may leave it out, and all that follows.
local asked = ARGV[FIRST + 9] or ''
local answer, session = ARGV[FIRST + 10] or '', ARGV[FIRST + 11] or ''
local target = tonumber(ARGV[FIRST + 12] or '0')
local kept = ARGV[FIRST + 13] or ''
local answer_limit = tonumber(ARGV[FIRST + 14] or '')
answer_limit = answer_limit and math.max(0, answer_limit)
-- An idempotency key lives this much longer than its request would without ever running.
local KEY_RESERVE_MS = 7 * 86400000

local num_pictures = tonumber(ARGV[FIRST + 15] or '0')
local picture_tokens = tonumber(ARGV[FIRST + 16] or '0')

local keys = take_keys(id)
local pictures = { unpack(KEYS, #KEYS - num_pictures + 1) }
local idempotency_key, holder_key = unpack(KEYS, next_key, #KEYS - num_pictures)

-- Puts a request that is known already back into its rank set, if it waits and is missing there.
local function find_again(its, its_id, found)
  if found.state == 'queued' then
    rank_again(its, its_id, found)
  end
end

local found = record_of(keys)
local state = found.state
if state then
  find_again(keys, id, found)
  return { 'known', id, state, found.asked or '' }
end

if idempotency_key then
  local held = redis.call('GET', idempotency_key)
  if held and held ~= id then
    if held ~= holder then
      return { 'held', held, '' }
    end
    local its = { record = holder_key }
    local other = record_of(its)
    if other.state then
      find_again(its, held, other)
      return { 'known', held, other.state }
    end
    -- The record of the holder is gone, so the key is free again.
  end
end

-- If an earlier request of this id expired before its end, it must no longer be counted.
forget(keys, id)

-- How long the rate of the tenant needs for the tokens, in microseconds; nil without a rate.
local cost
local time = redis.call('TIME')
local now_us = tonumber(time[1]) * 1000000 + tonumber(time[2])

-- The limit that is reached, or nil; for a rate also the milliseconds to wait. A limit of 0 is none.
local function limit_reached()
  local limits = redis.call('HMGET', CONTROL, 'max_requests', 'max_tokens', 'max_per_tenant',
    'max_of:' .. tenant, 'max_rate', 'max_rate_of:' .. tenant)
  local counts = redis.call('HMGET', COUNTS, 'tokens', 'tenant:' .. tenant)
  local function most(index)
    return tonumber(limits[index] or '0')
  end
  local waiting = redis.call('ZCARD', WAIT)
  local per_tenant = most(limits[4] and 4 or 3)
  local counted = tonumber(counts[1] or '0')
  if (MAX_BACKLOG > 0 and waiting >= MAX_BACKLOG) or (most(1) > 0 and waiting >= most(1)) then
    return 'requests'
  elseif most(2) > 0 and counted > 0 and counted + tokens > most(2) then
    -- A request above the limit by itself is let in when no tokens wait: otherwise its producer
    -- would be told for ever to try again later.
    return 'tokens'
  elseif per_tenant > 0 and tonumber(counts[2] or '0') >= per_tenant then
    return 'tenant'
  end
  local per_minute, wait = most(limits[6] and 6 or 5), 0
  if per_minute > 0 then
    cost, wait = rate_of(tenant, tokens + picture_tokens, per_minute, now_us)
  end
  if wait > 0 then
    return 'rate', wait
  end
  return nil
end

-- A request that names no length gets what the queue sets, or what is left of the context: a limit
-- of 0. It is fixed here, so that every worker ends the output at the same token. The request counts
-- for the most that it may get. `answer` is an assumption for as long as nobody knows that.
if answer_limit then
  local known = redis.call('HMGET', CONTROL, 'answer_tokens', 'size_scale')
  local set, context = tonumber(known[1] or '0') or 0, tonumber(known[2] or '0') or 0
  if set > 0 and (answer_limit == 0 or set < answer_limit) then
    answer_limit = set
  end
  local assumed = tonumber(answer) or 0
  local prompt = tokens - assumed
  local most = context > 0 and math.max(1, context - prompt) or nil
  if answer_limit > 0 then
    most = math.min(answer_limit, most or answer_limit)
  end
  answer = int(most or assumed)
  tokens = prompt + tonumber(answer)
end

local limit, rate_wait = limit_reached()
if limit then
  return { 'full', id, limit, rate_wait }
end

-- After the limits: a queue that is full takes no pictures.
local lacking = {}
for index, key in ipairs(pictures) do
  if redis.call('PTTL', key) == -2 then
    table.insert(lacking, index)
  end
end
if #lacking > 0 then
  return { 'lacks', id, table.concat(lacking, ' ') }
end

local now = math.floor(now_us / 1000)
local start = math.max(now, not_before)
local defaults = redis.call('HMGET', CONTROL, 'request_timeout_ms', 'target_latency_ms')
-- A request that says neither itself gets these times. They begin when it may be claimed.
local timeout = tonumber(defaults[1] or '0') or 0
if deadline == 0 and timeout > 0 then
  deadline = start + timeout
end
target = target > 0 and target or tonumber(defaults[2] or '0') or 0
local wait = MAX_QUEUE_MS
if deadline > 0 then
  wait = math.max(0, math.min(wait, deadline - start))
end
local life = start - now + wait + RETENTION_MS
-- This write comes first, so that a user who may not submit changes nothing.
redis.call('SET', keys.body, body, 'PX', int(life))
redis.call('HSET', keys.record, 'priority', priority, 'tenant', tenant, 'deadline_ms', int(deadline),
  'submitted_ms', int(now), 'asked', asked, unpack(INITIAL_FIELDS))
if answer ~= '' then
  redis.call('HSET', keys.record, 'answer', answer)
end
if answer_limit then
  redis.call('HSET', keys.record, 'answer_limit', int(answer_limit))
end
if cost then
  take_rate(tenant, cost, now_us)
  -- What an end may give back: not the part for the bytes of pictures, which stay.
  local part = tokens / math.max(1, tokens + picture_tokens)
  redis.call('HSET', keys.record, 'rate', int(math.floor(cost * part)))
end
if metadata ~= '' then
  redis.call('HSET', keys.record, 'metadata', metadata)
end
if kept ~= '' then
  -- In the record, and not under a key of its own: so it lives exactly as long as the results, and
  -- no other script, of whatever version, has to know it.
  redis.call('HSET', keys.record, 'kept', kept)
end
if idempotency_key then
  -- The record is renewed while the request runs and at its end, the key never: so the key lives
  -- longer from the beginning. A key that outlives its request is free again, see above.
  redis.call('SET', idempotency_key, id, 'PX', int(start - now + SPAN_MS + KEY_RESERVE_MS))
end
state = start > now and 'scheduled' or 'queued'
book(keys, id, '', state, tokens, tenant)
redis.call('HSET', keys.record, 'state', state)
local its = { priority = priority, deadline_ms = deadline, tenant = tenant, session = session }
if target > 0 then
  its.due_ms = int(start + target)
  redis.call('HSET', keys.record, 'due_ms', its.due_ms)
end
if session ~= '' then
  its.number = new_arrival()
  join_session(keys, id, its, its.number)
end
wait_from(id, start, deadline)
live_for(keys, life)
for _, key in ipairs(pictures) do
  live_on(key, life)
end
if state == 'scheduled' then
  redis.call('ZADD', DELAY, int(start), id)
elseif rank_anew(keys, id, its) then
  add_ticket(id, priority)
end
return { 'created', id, state }
