-- The window log: a window that begins with the first request, and remembers who used it up.
--
-- The state is a list under a key of its own: an element for each request, "TIMESTAMP COST TOTAL
-- START METADATA", oldest first. TOTAL is what has been charged in the window up to and with it,
-- and START when the window began, so that the newest element is all that a decision reads.
-- METADATA is whatever the caller gave, any bytes. The Rust twin is window_log.rs in
-- ratelimit-core. README.md beside this file specifies what each section receives and what it
-- leaves.

--- fresh
-- The newest element, with the total and the start of its window; whether that goes on.
local newest, total, begun, goes_on = nil, 0, nil, false
local last_us, start = now, now

-- The element at an index, the oldest at 0 and the newest at -1.
local function element_at(index)
  local element = call('LINDEX', key0, index)
  if not element then return nil end
  local us, cost, total, start, metadata = match(element, '^(%d+) (%d+) (%d+) (%d+) (.*)$')
  if not us or math.max(us + 0, cost + 0, total + 0, start + 0) >= 2 ^ 53 then error(CORRUPT0) end
  return element, us + 0, cost + 0, total + 0, start + 0, metadata
end

--- read
-- The list stays on the server: its newest element is what a step begins with.
local _, us
newest, us, _, total, begun = element_at(-1)
if newest and now < begun + window_us then
  -- A request from before the start, by a clock that went back, falls into the window too.
  used, goes_on, start = total, true, begun
  if us > now then last_us = us end
end

--- level
-- A state written under a larger limit uses at most this limit: its first requests used it up.
most = limit
left = used < limit and limit - used or 0

--- seen
-- The window's start and total.
if newest then seen = format('window-log %d %d', begun, total) end

--- charge
if act0 == 'full' or newest and not goes_on then command('UNLINK', key0) end
command('RPUSH', key0, format('%d %d %d %d ', last_us, charge, used + charge, start) .. metadata0)
-- The key of a window that goes on lives until its end.
if not goes_on or padding_ms then expires = start + window_us end
mark0 = start

--- undo
-- A charge is taken back from the window that it went into.
act0 = goes_on and start == made and 'give' or nil

--- give
-- Takes the cost off the newest entries: a refund undoes what was charged last.
local rest = used - charge
local index = first_for(0, call('LLEN', key0) - 1, function(index)
  local _, _, _, total = element_at(index)
  return total >= rest
end)
local _, us, cost, total, begun, metadata = element_at(index)
if total < rest or total - cost >= rest then error(CORRUPT0) end
command('LTRIM', key0, 0, index)
command('LSET', key0, -1, format('%d %d %d %d ', us, cost - (total - rest), rest, begun) .. metadata)
