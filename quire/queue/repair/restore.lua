-- RESTORE: give open requests back what the server has lost of the queue around them.
--
-- KEYS  those of running.lua with every request
-- ARGV  per request: id. The caller read them from the open requests; each is looked at again here.
-- Returns per request what was lost: entry | delay | lease | wait | record; '' when nothing was.
-- A queued request is in its rank set (`entry`), a scheduled one has its time in the delay set, a
-- running one its lease, and one that waits its time in the wait set. If that was deleted or
-- evicted, nobody would ever look at the request again. This also computes ranks anew after the
-- policy has changed, and adds tickets where a class has fewer than requests that wait.

local now = now_ms()

-- When a scheduled request may go on: its time to wait begins then, unless a deadline cuts it short.
local function due_of(id, record)
  local latest = tonumber(redis.call('ZSCORE', WAIT, id) or '0')
  if latest == tonumber(record.deadline_ms) then
    return now
  end
  return math.max(now, latest - MAX_QUEUE_MS)
end

-- What holds a request of each state; each gives it back and returns its name if it was lost.
local HOLDERS = {
  queued = function(keys, id, record)
    local before = redis.call('ZSCORE', ranks_of(record.priority), id)
    local is_missing = rank_again(keys, id, record)
    if before and tonumber(before) ~= tonumber(rank_of_record(id, record)) then
      rank(keys, id, record)
    end
    return is_missing and 'entry' or nil
  end,
  scheduled = function(_, id, record)
    if not redis.call('ZSCORE', DELAY, id) then
      redis.call('ZADD', DELAY, int(due_of(id, record)), id)
      return 'delay'
    end
  end,
  running = function(_, id)
    if not redis.call('ZSCORE', LEASE, id) then
      redis.call('ZADD', LEASE, int(now + LEASE_MS), id)
      return 'lease'
    end
  end,
}

-- Gives a turn its entry in `turn` and `turns` back. Returns whether it was lost.
local function join_again(id, record)
  if not record.session or not record.turn or WAITS[record.state] == nil then
    return false
  end
  local turn = turn_of(id)
  local is_lost = not turn or not redis.call('ZSCORE', TURNS, member_of(id, turn))
  if is_lost then
    write_turn(id, { number = record.turn, moment = moment_of_record(record),
      priority = record.priority, deadline_ms = record.deadline_ms,
      session = record.tenant .. ':' .. record.session })
  end
  return is_lost
end

local function restore(keys, id)
  local record = record_of(keys)
  if not record.state then
    local was_open = booked(id).state ~= ''
    forget(keys, id)
    return was_open and 'record' or ''
  end
  local lost = join_again(id, record) and 'entry' or nil
  local holder = HOLDERS[record.state]
  lost = holder and holder(keys, id, record) or lost
  if WAITS[record.state] and not redis.call('ZSCORE', WAIT, id) then
    wait_from(id, now, tonumber(record.deadline_ms))
    live_for(keys, SPAN_MS)
    lost = lost or 'wait'
  end
  return lost or ''
end

local replies = {}
for at = FIRST, #ARGV do
  replies[#replies + 1] = restore(take_keys(ARGV[at]), ARGV[at])
end
return replies
