-- Shared by every transition; put before the text of each.
--
-- The first nine arguments are the broker's settings, the transition's own follow them. Messages
-- (bodies, tokens, ends) are opaque strings here. All numbers are milliseconds of Redis' own clock
-- except a request's deadline and due time, which its producer computed from that clock.

local LEASE_MS = tonumber(ARGV[1])
local MAX_QUEUE_MS = tonumber(ARGV[2])
local RETENTION_MS = tonumber(ARGV[3])
local MAX_ATTEMPTS = tonumber(ARGV[4])
local MAX_BACKLOG = tonumber(ARGV[5]) -- 0 for no limit
local FIRST = 10 -- the index of the transition's own first argument

-- How long the keys of an open request live unless they are renewed.
local SPAN_MS = MAX_QUEUE_MS + RETENTION_MS

-- The ends a request can come to while no worker runs it.
local ENDINGS = {
  cancelled = { state = 'cancelled', done = ARGV[6] },
  deadline = { state = 'expired', done = ARGV[7] },
  queue_timeout = { state = 'expired', done = ARGV[8] },
  attempts_spent = { state = 'failed', done = ARGV[9] },
}

-- Lua writes large numbers with an exponent; Redis must never see one.
local function int(number)
  return string.format('%.0f', number)
end

local function now_ms()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

-- Lets a picture live this long, or as long as it does already. Nothing for one that has expired.
local function live_on(picture, milliseconds)
  if redis.call('PTTL', picture) < milliseconds then
    redis.call('PEXPIRE', picture, int(milliseconds))
  end
end

-- A flat list of names and values as a table.
local function table_of(flat)
  local fields = {}
  for index = 1, #flat, 2 do
    fields[flat[index]] = flat[index + 1]
  end
  return fields
end
