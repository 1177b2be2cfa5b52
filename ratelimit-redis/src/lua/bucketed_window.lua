-- The bucketed window: a count per bucket, summed over several windows.
--
-- A window of n buckets is the current bucket and the n - 1 before it. The state is the buckets in
-- which something was admitted, oldest first, as text in a field of the identifier's hash: their
-- starts and counts in turn. The Rust twin is bucketed_window.rs in ratelimit-core. What an algorithm
-- here is made of, and where the helpers come from, stands at the head of gcra.lua.

local bucketed_window = number_pairs('bucketed-window', 'start', 'count')
bucketed_window.parameters = {
  'bucket_us', 'limit1', 'span1_us', 'limit2', 'span2_us', 'limit3', 'span3_us', 'limit4', 'span4_us',
}

local function windows(limit)
  local all = {}
  for n = 1, 4 do
    if limit['limit' .. n] > 0 then
      all[n] = { limit = limit['limit' .. n], span_us = limit['span' .. n .. '_us'] }
    end
  end
  return all
end

local function longest_us(limit)
  local longest = 0
  for _, window in ipairs(windows(limit)) do longest = math.max(longest, window.span_us) end
  return longest
end

local function aligned(limit, tick)
  return tick - math.fmod(tick, limit.bucket_us)
end

-- When a bucket stops to count in a window: when the one begins that is a window's length later. Its
-- start is aligned anew, because it may have been written for other buckets.
local function end_us(limit, bucket, span_us)
  return aligned(limit, bucket.start) + span_us
end

-- The buckets that still count in a window, of those that there are at `current`.
local function counting(limit, buckets, current, span_us)
  local kept = {}
  for _, bucket in ipairs(buckets) do
    if end_us(limit, bucket, span_us) > current then kept[#kept + 1] = bucket end
  end
  return kept
end

local function sum(buckets)
  local total = 0
  for _, bucket in ipairs(buckets) do total = total + bucket.count end
  return total
end

local function live(limit, state, now)
  local current = aligned(limit, now)
  if not state then return { current = current, buckets = {} } end
  current = math.max(current, aligned(limit, state[#state].start))
  return { current = current, buckets = counting(limit, state, current, longest_us(limit)) }
end

-- What a window has left.
local function left_in(limit, seen, window)
  return math.max(window.limit - sum(counting(limit, seen.buckets, seen.current, window.span_us)), 0)
end

-- What every window has left.
local function left(limit, seen)
  local least = nil
  for _, window in ipairs(windows(limit)) do
    least = math.min(least or window.limit, left_in(limit, seen, window))
  end
  return least
end

-- When `cost` fits all windows; NEVER if it never does.
local function fits_us(limit, seen, cost)
  local fits = seen.current
  for _, window in ipairs(windows(limit)) do
    local room = window.limit - cost
    if room < 0 then return NEVER end
    local buckets = counting(limit, seen.buckets, seen.current, window.span_us)
    local used = sum(buckets)
    for _, bucket in ipairs(buckets) do
      if used <= room then break end
      used = used - bucket.count
      fits = math.max(fits, end_us(limit, bucket, window.span_us))
    end
  end
  return fits
end

local function decision(limit, now, seen, retry_us)
  local remaining, shown = nil, nil
  for _, window in ipairs(windows(limit)) do
    local window_left = left_in(limit, seen, window)
    if not remaining or window_left < remaining then
      remaining, shown = window_left, window.limit
    end
  end
  local last = seen.buckets[#seen.buckets]
  return {
    allowed = retry_us == 0,
    limit = shown,
    remaining = remaining,
    retry_after_us = retry_us,
    reset_after_us = last and end_us(limit, last, longest_us(limit)) - now or 0,
  }
end

local function charged(limit, now, seen, charge)
  if charge == 0 then return decision(limit, now, seen, 0) end
  local buckets = seen.buckets
  local last = buckets[#buckets]
  if last and aligned(limit, last.start) >= seen.current then
    buckets[#buckets] = { start = last.start, count = last.count + charge }
  else
    buckets[#buckets + 1] = { start = seen.current, count = charge }
  end
  local ends_us = end_us(limit, buckets[#buckets], longest_us(limit))
  return decision(limit, now, seen, 0), 'put', buckets, ends_us
end

function bucketed_window.step(limit, state, now, cost)
  local seen = live(limit, state, now)
  if cost > left(limit, seen) then
    local fits = fits_us(limit, seen, cost)
    return decision(limit, now, seen, fits == NEVER and NEVER or fits - now)
  end
  return charged(limit, now, seen, cost)
end

function bucketed_window.force(limit, state, now, cost)
  local seen = live(limit, state, now)
  return charged(limit, now, seen, math.min(cost, left(limit, seen)))
end

-- Takes the cost off the newest buckets: a refund undoes what was charged last.
function bucketed_window.refund(limit, state, now, cost)
  local seen = live(limit, state, now)
  local buckets = seen.buckets
  if cost == 0 or #buckets == 0 then return decision(limit, now, seen, 0) end
  local owed = cost
  while owed > 0 and #buckets > 0 do
    local last = buckets[#buckets]
    local back = math.min(owed, last.count)
    owed = owed - back
    buckets[#buckets] = last.count > back and { start = last.start, count = last.count - back } or nil
  end
  -- Without its newest bucket the state may be of an earlier time.
  local newest = buckets[#buckets]
  seen.current = math.max(aligned(limit, now), newest and aligned(limit, newest.start) or 0)
  local answer = decision(limit, now, seen, 0)
  if not newest then return answer, 'remove' end
  return answer, 'put', buckets, end_us(limit, buckets[#buckets], longest_us(limit))
end

-- The current bucket's count goes on beyond the limits, as far as the sum of all stays exact.
function bucketed_window.overcharge(limit, state, now, charge)
  local seen = live(limit, state, now)
  charge = math.min(charge, MOST - sum(seen.buckets))
  return select(2, charged(limit, now, seen, charge))
end

return bucketed_window
