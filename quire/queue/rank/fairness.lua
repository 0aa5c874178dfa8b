-- Shared by the transitions of a request: fairness between the tenants of a class, and their rates.
--
-- KEYS  4 control, 11..14 rank by priority, 15 arrival, 16..19 fair by priority, 20 rate
--
-- Start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996), with tokens as the length of a
-- request. Each class has a virtual time, in tokens. A request gets a virtual start when it is
-- queued: where the request of its tenant before it finishes, but not before the virtual time. So
-- a tenant that returns is lifted to the least active one. The virtual time is the latest start of
-- the requests that were claimed.
-- A request is ranked by the moment that belongs to its start, in place of its arrival. While the
-- starts of a class grow, these moments are the arrivals themselves. A tenant that is behind gets
-- the moments of the requests beside which it has to run. So all policies order these moments as
-- they order arrivals. Between two arrivals, a token counts as a microsecond.

local RATE = KEYS[20]

-- The tokens of this time may be used at once: as many as a tenant's rate gives in a minute.
local RATE_WINDOW_US = 60000000

-- A moment is stored if it is so much later than the stored ones give. This gap doubles with every
-- 64 stored moments, so that 24 hours of waiting store about 1,300.
local FIRST_GAP_US, GAPS_OF_A_SIZE = 1000, 64

-- The most entries of tenants that one call removes: a limit on its time. An entry that stays does
-- no harm, because its tenant is lifted as well.
local MAX_FORGOTTEN = 500

-- Virtual start -> the moment, and tenant -> where its next request starts, in one set per class.
-- The scores of moments are negative, so that a range of scores has only one of the two kinds.
local function shares_of(priority)
  return KEYS[16 + tonumber(priority)]
end

local function is_fair()
  return policy_of_queue().fairness == 'tokens'
end

-- The virtual time of a class, the last start that was lifted to it, the latest start of all, and
-- the first start since no request of the class waited. Nil before the first request.
local function clock_of(priority)
  local text = redis.call('HGET', ARRIVAL, 'fair:' .. priority) or ''
  local time, lifted, newest, since = string.match(text, '^(%d+) (%d+) (%d+) (%d+)$')
  if not time then
    return nil
  end
  return { time = tonumber(time), lifted = tonumber(lifted), newest = tonumber(newest),
    since = tonumber(since) }
end

local function set_clock(priority, clock)
  redis.call('HSET', ARRIVAL, 'fair:' .. priority, int(clock.time) .. ' ' .. int(clock.lifted)
    .. ' ' .. int(clock.newest) .. ' ' .. int(clock.since))
end

-- The last moment at or before a virtual start: what has to be added to a start from there on, as
-- a text. Nil if there is none.
local function shift_at(key, start)
  return redis.call('ZRANGEBYSCORE', key, int(-start), '(0', 'LIMIT', 0, 1)[1]
end

-- The clock of a class to which a request is added. All is forgotten when nothing waits.
local function clock_now(priority, key, now)
  local clock = clock_of(priority)
  if not clock or redis.call('ZCARD', ranks_of(priority)) == 0 then
    redis.call('DEL', key)
    local start = math.max(now, clock and math.max(clock.newest, clock.time) + 1 or 0)
    return { time = start, lifted = start - 1, newest = start, since = start }
  end
  -- A tenant whose next start is over would be lifted, and a moment before the last one is unused.
  local over = redis.call('ZRANGEBYSCORE', key, '(0', int(clock.time), 'LIMIT', 0, MAX_FORGOTTEN)
  if #over > 0 then
    redis.call('ZREM', key, unpack(over))
  end
  local shift = shift_at(key, clock.time)
  if shift then
    local score = int(tonumber(redis.call('ZSCORE', key, shift)))
    redis.call('ZREMRANGEBYSCORE', key, '(' .. score, '(0')
  end
  return clock
end

-- The virtual start of the next request of a tenant.
local function start_of(key, clock, tenant)
  local finish = redis.call('ZSCORE', key, 'finish:' .. tenant)
  local last = redis.call('ZSCORE', key, 'start:' .. tenant)
  local start = math.max(tonumber(finish or '0'), tonumber(last or '-1') + 1)
  if start < clock.time then
    -- One token apart, so that the tenants that are lifted keep their order.
    clock.lifted = math.max(clock.time, clock.lifted + 1)
    return clock.lifted
  end
  return start
end

-- The time from which a request with this virtual start is ranked, in microseconds. For the latest
-- start of all it is the time of its arrival.
local function moment_of(key, clock, start, now)
  local shift = tonumber(shift_at(key, start) or '')
  if not shift or start > clock.newest then
    clock.newest = math.max(clock.newest, start)
    local num_gaps = redis.call('ZCOUNT', key, '-inf', '(0')
    local gap = FIRST_GAP_US * 2 ^ math.floor(num_gaps / GAPS_OF_A_SIZE)
    if not shift or now - start - shift > gap then
      shift = now - start
      redis.call('ZADD', key, int(-start), int(shift))
    end
  end
  return start + shift
end

-- Adds the tokens of a request to its tenant's virtual counter. Returns three numbers in one text,
-- as the request's record keeps them: the time from which it is ranked, its virtual start, and its
-- length in tokens divided by the tenant's weight. Call it before the request is ranked.
local function share_of(priority, tenant, tokens, arrival)
  local key, now = shares_of(priority), tonumber(arrival)
  local weight = tonumber(redis.call('HGET', CONTROL, 'weight:' .. tenant) or '') or 1
  local length = math.max(1, math.floor(tokens / math.max(1, weight) + 0.5))
  local clock = clock_now(priority, key, now)
  local start = start_of(key, clock, tenant)
  local moment = moment_of(key, clock, start, now)
  redis.call('ZADD', key, int(start + length), 'finish:' .. tenant, int(start), 'start:' .. tenant)
  redis.call('PEXPIRE', key, int(SPAN_MS))
  set_clock(priority, clock)
  return int(moment) .. ' ' .. int(start) .. ' ' .. int(length)
end

-- The parts of what `share_of` returned, as texts.
local function parts_of(share)
  return string.match(share or '', '^(%d+) (%d+) (%d+)$')
end

-- The virtual time of a class comes to the start of a request that is claimed.
local function pass_time(priority, share)
  local _, start = parts_of(share)
  local clock = start and clock_of(priority)
  if clock and tonumber(start) > clock.time then
    clock.time = tonumber(start)
    set_clock(priority, clock)
  end
end

-- Takes back a part of what `share_of` has counted, `part` from 0 to 1. Nothing is saved up for a
-- tenant of which nothing is counted any more. `is_free`: the request has ended while it waited, so
-- that the next one of its tenant may take its turn.
local function give_back_share(priority, tenant, share, part, is_free)
  local _, start, length = parts_of(share)
  local clock = start and clock_of(priority)
  if not clock or tonumber(start) < clock.since then
    return
  end
  local key, back = shares_of(priority), math.floor(tonumber(length) * part)
  local finish = redis.call('ZSCORE', key, 'finish:' .. tenant)
  if finish and back > 0 then
    redis.call('ZADD', key, int(math.max(0, tonumber(finish) - back)), 'finish:' .. tenant)
  end
  local last = redis.call('ZSCORE', key, 'start:' .. tenant)
  if is_free and last and tonumber(last) >= tonumber(start) then
    redis.call('ZADD', key, int(tonumber(start) - 1), 'start:' .. tenant)
  end
end

-- How long a tenant's rate needs for these tokens, in microseconds, and how many milliseconds it
-- has to wait before. This is the generic cell rate algorithm (ITU-T I.371): RATE has the moment
-- at which the tenant has used nothing of its minute. A request above that is let in then.
local function rate_of(tenant, tokens, per_minute, now)
  local cost = math.min(1e14, math.ceil(tokens * RATE_WINDOW_US / per_minute))
  local used = math.max(0, tonumber(redis.call('ZSCORE', RATE, tenant) or '0') - now)
  return cost, math.max(0, math.ceil((used + math.min(0, cost - RATE_WINDOW_US)) / 1000))
end

local function take_rate(tenant, cost, now)
  local before = math.max(now, tonumber(redis.call('ZSCORE', RATE, tenant) or '0'))
  redis.call('ZREMRANGEBYSCORE', RATE, '-inf', int(now))
  redis.call('ZADD', RATE, int(before + cost), tenant)
  local life = math.ceil((before + cost - now) / 1000) + 1000
  redis.call('PEXPIRE', RATE, int(math.max(life, redis.call('PTTL', RATE))))
end

local function give_back_rate(tenant, back)
  local before = redis.call('ZSCORE', RATE, tenant)
  if before and back > 0 then
    redis.call('ZADD', RATE, int(math.max(0, tonumber(before) - back)), tenant)
  end
end

-- Gives a tenant back, at the end of its request, the tokens that were counted and not used.
-- `record` has the fields priority, fair, rate, answer, published and claimed_ms. Returns nothing.
local function give_back(record, tenant, tokens)
  local unused = tonumber(record.answer or '0') - tonumber(record.published)
  local part = math.max(0, math.min(1, unused / math.max(1, tokens)))
  if not record.claimed_ms then
    part = 1
  end
  if record.fair then
    give_back_share(record.priority, tenant, record.fair, part, not record.claimed_ms)
  end
  if record.rate then
    give_back_rate(tenant, math.floor(tonumber(record.rate) * part))
  end
end
