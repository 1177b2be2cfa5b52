-- Acquires one check of a sliding log. sliding_log.lua specifies the state; README.md beside this file
-- specifies what a script of one check receives and returns.
--
-- Returns only as much of the log as the step needs, in at most three pairs of a time and a cost: the oldest
-- entry; the cost after it up to the entry at which enough has expired; and the cost after that at the time of the
-- newest entry.

local key = KEYS[1]
local at, used, stale, total = now, 0, 0, 0
-- A time before the newest entry counts as the time of that entry.
local member, last_us, last_cost
local newest = call('ZRANGE', key, -1, -1, 'WITHSCORES')
if newest[1] then
  member, last_us = newest[1], newest[2] + 0
  last_cost, total = match(member, '^(%d+) (%d+)$')
  if not total then return '?' end
  last_cost, total = last_cost + 0, total + 0
  if not (last_cost < 2^52 and total < 2^52) then return '?' end
  if not (last_us >= 0 and last_us < 2^52 and last_us % 1 == 0) then return '?' end
  if last_us > at then at = last_us end
end
-- The difference of two totals is the cost between the two entries, both included.
local first_us, first_cost, before
if member and last_us + window_us > at then
  stale = call('ZCOUNT', key, '-inf', format('%d', at - window_us))
  local first = call('ZRANGE', key, stale, stale, 'WITHSCORES')
  local of_first
  first_cost, of_first = match(first[1], '^(%d+) (%d+)$')
  if not of_first then return '?' end
  first_us, first_cost, of_first = first[2] + 0, first_cost + 0, of_first + 0
  if not (first_cost < 2^52 and of_first < 2^52) then return '?' end
  if not (first_us >= 0 and first_us % 1 == 0) then return '?' end
  before = of_first - first_cost
  if before < 0 then before = before + 2^52 end
  used = total - before
  if used < 0 then used = used + 2^52 end
end
-- The driver steps a log that exceeds a limit which was lowered.
if used > capacity then return '?' end
-- The text of the entries; those of a cost of 0 are left out.
local function log_of(middle_us, middle_cost, newest_cost)
  local log = format('sliding-log %d %d', first_us, first_cost)
  if middle_cost > 0 then log = log .. format(' %d %d', middle_us, middle_cost) end
  if newest_cost > 0 then log = log .. format(' %d %d', last_us, newest_cost) end
  return log
end
local after = used + charge
if after > capacity then
  local excess = after - capacity
  if excess > used then excess = used end
  if used == 0 then return time .. '\n0\n0:' end
  -- Binary search for the first entry at which enough cost has expired.
  local freed, freed_us = first_cost, first_us
  if first_cost < excess then
    local low, high = stale, call('ZCARD', key) - 1
    while low <= high do
      local middle = floor((low + high) / 2)
      local entry = call('ZRANGE', key, middle, middle, 'WITHSCORES')
      local cost, of_entry = match(entry[1], '^(%d+) (%d+)$')
      if not (of_entry and cost + 0 < 2^52 and of_entry + 0 < 2^52 and entry[2] % 1 == 0) then return '?' end
      local sum = of_entry - before
      if sum < 0 then sum = sum + 2^52 end
      if sum >= excess then
        freed, freed_us, high = sum, entry[2] + 0, middle - 1
      else
        low = middle + 1
      end
    end
  end
  local seen = log_of(freed_us, freed - first_cost, used - freed)
  return time .. '\n0\n' .. #seen .. ':' .. seen
end
local state = ''
if used > 0 then state = log_of(last_us, 0, used - first_cost) end
local ttl_ms = ceil((at + window_us - now) / 1000) + padding_ms
local short = call('PTTL', key) < ttl_ms
local done
if member and used == 0 then
  -- No entry counts any longer.
  done = redis.pcall('UNLINK', key)
  if type(done) == 'table' then return done end
  member, short = nil, true
end
total = (total + charge) % 2^52
local cost = charge
local same = member and last_us == at
if same then cost = charge + last_cost end
done = redis.pcall('ZADD', key, format('%d', at), format('%d %d', cost, total))
if type(done) == 'table' then return done end
if same then done = redis.pcall('ZREM', key, member) end
if stale > 0 and type(done) ~= 'table' then
  done = redis.pcall('ZREMRANGEBYRANK', key, 0, (stale < 100 and stale or 100) - 1)
end
if short and type(done) ~= 'table' then
  done = redis.pcall('PEXPIRE', key, format('%d', ttl_ms))
end
if type(done) == 'table' then return redis.error_reply('RLPART ' .. (match(done.err, '%u%u+ .*') or done.err)) end
return time .. '\n1\n' .. #state .. ':' .. state
