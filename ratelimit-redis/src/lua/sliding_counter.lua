-- The sliding counter: two fixed windows, the older one weighed by how much of it is still in view.
--
-- Of the window before counts floor(previous * overlap / window_us), of the current one everything.
-- The state is when the current window began and what both admitted. The Rust twin is
-- sliding_counter.rs in ratelimit-core, with the same names in the same order. What an algorithm
-- here is made of, and where the helpers come from, stands at the head of gcra.lua.

local sliding_counter = numbers('sliding-counter', { 'start', 'previous', 'current' })
sliding_counter.parameters = { 'limit', 'window_us' }

-- a * b / c rounded down, and what is left over, exactly; a is at most c. Where the product is too
-- large for a double it is never made: b goes in bit by bit, from the highest.
local function multiplied_divided(a, b, c)
  if a * b < 9007199254740992 then
    local rest = math.fmod(a * b, c)
    return (a * b - rest) / c, rest
  end
  local quotient, rest = 0, 0
  local function carry()
    if rest >= c then
      rest, quotient = rest - c, quotient + 1
    end
  end
  for bit = 51, 0, -1 do
    quotient, rest = 2 * quotient, 2 * rest
    carry()
    if b >= 2 ^ bit then
      b, rest = b - 2 ^ bit, rest + a
      carry()
    end
  end
  return quotient, rest
end

local function aligned(limit, tick)
  return tick - math.fmod(tick, limit.window_us)
end

-- The two windows that a request at `now` looks at.
local function windows(limit, state, now)
  local start = aligned(limit, now)
  if not state then return { start = start, previous = 0, current = 0 } end
  -- The start is aligned anew, because it may have been written for another window, and what was
  -- admitted under a larger limit counts as no more than this one's.
  local written = aligned(limit, state.start)
  local previous, current = math.min(state.previous, limit.limit), math.min(state.current, limit.limit)
  if written >= start then
    -- Of this window, or of a later one: the clock went back, and the state's counts.
    return { start = written, previous = previous, current = current }
  end
  if written + limit.window_us == start then
    return { start = start, previous = current, current = 0 }
  end
  return { start = start, previous = 0, current = 0 }
end

-- What counts of both windows.
local function used(limit, seen, now)
  local overlap_us = limit.window_us - math.max(now - seen.start, 0)
  return multiplied_divided(overlap_us, seen.previous, limit.window_us) + seen.current
end

-- When at most `room` of a window's `count` will count, in the window that begins after it.
local function faded_us(limit, start, count, room)
  if count <= room then return start end
  -- count * overlap / window_us < room + 1 holds up to this overlap.
  local overlap_us, rest = multiplied_divided(room + 1, limit.window_us, count)
  if rest == 0 then overlap_us = overlap_us - 1 end
  return start + limit.window_us - overlap_us
end

-- When `cost`, which is at most the limit, will fit.
local function fits_us(limit, seen, cost)
  local room = limit.limit - cost
  if room >= seen.current then
    return faded_us(limit, seen.start, seen.previous, room - seen.current)
  end
  -- Not in this window.
  return faded_us(limit, seen.start + limit.window_us, seen.current, room)
end

-- When nothing will count any more.
local function empty_us(limit, seen)
  if seen.current == 0 then return faded_us(limit, seen.start, seen.previous, 0) end
  return faded_us(limit, seen.start + limit.window_us, seen.current, 0)
end

local function decision(limit, now, seen, retry_us)
  local counted = used(limit, seen, now)
  return {
    allowed = retry_us == 0,
    remaining = math.max(limit.limit - counted, 0),
    retry_after_us = retry_us,
    reset_after_us = counted == 0 and 0 or math.max(empty_us(limit, seen) - now, 0),
  }
end

local function admitted(limit, now, seen, current)
  local state = { start = seen.start, previous = seen.previous, current = current }
  local answer = decision(limit, now, state, 0)
  if current == seen.current then return answer end
  if used(limit, state, now) == 0 then return answer, 'remove' end
  return answer, 'put', state, empty_us(limit, state)
end

function sliding_counter.step(limit, state, now, cost)
  local seen = windows(limit, state, now)
  if cost > math.max(limit.limit - used(limit, seen, now), 0) then
    local retry_us = NEVER
    if cost <= limit.limit then retry_us = fits_us(limit, seen, cost) - now end
    return decision(limit, now, seen, retry_us)
  end
  return admitted(limit, now, seen, seen.current + cost)
end

-- Takes the cost off the current window; what is past stays.
function sliding_counter.refund(limit, state, now, cost)
  local seen = windows(limit, state, now)
  return admitted(limit, now, seen, math.max(seen.current - cost, 0))
end

function sliding_counter.force(limit, state, now, cost)
  local seen = windows(limit, state, now)
  local left = math.max(limit.limit - used(limit, seen, now), 0)
  return admitted(limit, now, seen, seen.current + math.min(cost, left))
end

-- The current window counts up to the limit, whatever overlaps of the previous one.
function sliding_counter.fill(limit, state, now, charge)
  local seen = windows(limit, state, now)
  return select(2, admitted(limit, now, seen, math.min(seen.current + charge, limit.limit)))
end

-- A charge goes into the newest window.
function sliding_counter.mark(state)
  return state.start
end

return sliding_counter
