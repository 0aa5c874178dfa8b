-- Shared by the transitions of a request: the order in which the requests that wait are claimed.
--
-- KEYS  4 control, 6..9 ingress by priority, 11..14 rank by priority, 15 arrival
--
-- The rank set of a class has every queued request of that class; a worker claims the lowest rank
-- next. The stream of the class has one entry for each of them, whichever: a ticket. The rank sets
-- say which requests wait. The streams say how many, and wake workers that wait for one.

local CONTROL, ARRIVAL = KEYS[4], KEYS[15]

-- The consumer by which scripts take tickets. Nothing is ever pending for it.
local TICKETS = 'tickets'

-- What a class is worth while no worker has announced a policy: three years of waiting. So a better
-- class comes first, and a rank is still an integer that a double holds exactly.
local CLASS_US = 1e14

-- The number of a class. Any other number would name a key of another kind.
local function class_of(priority)
  return assert(string.match(tostring(priority), '^[0-3]$'), 'not a class')
end

local function ingress_of(priority)
  return KEYS[6 + class_of(priority)]
end

local function ranks_of(priority)
  return KEYS[11 + class_of(priority)]
end

-- The arrival of a request that is queued now, in microseconds. Always later than every earlier
-- one, so that equal requests keep their order when the clock steps back, and when two are queued
-- in the same microsecond.
local function new_arrival()
  local time = redis.call('TIME')
  local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
  local last = tonumber(redis.call('HGET', ARRIVAL, 'last') or '0') or 0
  local arrival = int(math.max(now, last + 1))
  -- In a hash: workers may write no string, or they could submit.
  redis.call('HSET', ARRIVAL, 'last', arrival)
  return arrival
end

-- The standing of a request by each policy, in microseconds. These are the formulas of the engine,
-- see engine/scheduling/policy.py: a test compares them case by case.
local STANDINGS = {
  fcfs = function()
    return 0
  end,
  sjf = function(policy, request)
    return policy.aging * math.min(1, request.tokens / policy.scale)
  end,
  priority = function(policy, request)
    return -policy.aging * request.priority
  end,
  adaptive = function(policy, request)
    local standing = policy.aging * math.min(1, request.tokens / policy.scale)
    if request.deadline > 0 then
      standing = math.min(standing, request.deadline - request.arrival - policy.aging)
    end
    return standing - policy.aging * request.priority
  end,
}

local function better_class_first(_, request)
  return -CLASS_US * request.priority
end

local known_policy

-- The policy that workers announced last, see ANNOUNCE.
local function policy_of_queue()
  if not known_policy then
    local found = redis.call('HMGET', CONTROL, 'policy', 'aging_ms', 'size_scale', 'fairness')
    known_policy = {
      standing = STANDINGS[found[1] or ''] or better_class_first,
      aging = (tonumber(found[2] or '') or 0) * 1000,
      scale = math.max(1, tonumber(found[3] or '') or 1),
      fairness = found[4],
    }
  end
  return known_policy
end

-- The rank of a request: its arrival plus its standing, in whole microseconds.
local function rank_of(priority, tokens, deadline_ms, arrival)
  local policy = policy_of_queue()
  local request = { priority = tonumber(priority), tokens = tonumber(tokens),
    deadline = tonumber(deadline_ms) * 1000, arrival = tonumber(arrival) }
  return int(math.floor(request.arrival + policy.standing(policy, request) + 0.5))
end

local function add_ticket(id, priority)
  redis.call('XADD', ingress_of(priority), '*', 'id', id)
end

-- How many tickets a class has more than requests that wait; below 0 some are missing.
local function surplus_of(priority)
  return redis.call('XLEN', ingress_of(priority)) - redis.call('ZCARD', ranks_of(priority))
end

-- The classes, the most usual one first.
local CLASSES = { 1, 2, 0, 3 }

-- Removes a request from the rank sets. Its ticket stays: it may be any of them.
local function unrank(id)
  for _, priority in ipairs(CLASSES) do
    if redis.call('ZREM', ranks_of(priority), id) == 1 then
      return
    end
  end
end
