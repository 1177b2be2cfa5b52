-- The fixed window, aligned to the clock: a count that restarts at every full period, or in every
-- window of a calendar.
--
-- The state is the start of the window, the cost admitted in it, and its end. A count above the
-- capacity, up to `most`, is owed: each following window begins with what is left of it once the
-- capacity has been taken off. The Rust twin is fixed_window.rs in ratelimit-core. README.md beside
-- this file specifies what each section receives and what it leaves.
--
-- A script knows no calendar. Where `window_us` is 0, the client says how long no window is longer
-- than, and where those begin that are around its own time. What is owed there is at most the
-- capacity: one window pays it. In the end of a state that owes, that window counts as the longest,
-- so that the state tells the end of its own window (`ended`).

--- fresh
start, count, ends_us = now, 0, now

--- valid
start < 2^52

--- bounds
-- The begins of the window before, of the present one, and of both that follow. The client gives
-- two more, because the server may be in the window before or after that of the client.
local earlier, current, finish, following
local outside = false
if window_us == 0 then
  local first = limit0 + (now < args0[limit0 + 3] + 0 and 1 or now < args0[limit0 + 4] + 0 and 2 or 3)
  window_us = args0[limit0] + 0
  earlier, current, finish, following =
    args0[first] + 0, args0[first + 1] + 0, args0[first + 2] + 0, args0[first + 3] + 0
  limit0 = limit0 + 7
  outside = now < current or now >= finish
end

--- level
local begun, held, written_us = start, count, ends_us
local used, ended = 0, nil
if not earlier then
  current = now - now % window_us
elseif begun >= current and begun < finish then
  ended = finish
else
  ended = written_us - math.max(ceil((written_us - begun) / window_us) - 1, 0) * window_us
end
-- The end in a state of a calendar may be later than that of two windows, which pay all.
if now < ends_us and not (earlier and start < earlier) then
  -- A state written under a larger limit is capped at this limit.
  used = count < most and count or most
  if start < current then
    local over = earlier and 1 or floor((current - start) / window_us)
    used = math.max(used - over * capacity, 0)
  end
else
  held, start = 0, current
end
-- An earlier window is over. A later one, written before the clock went back, counts.
if start < current then start = current end
if start > at then at = start end

--- move
count = after
if earlier then
  local closes = start == begun and ended or finish
  ends_us = closes + (count > capacity and ceil(count / capacity) - 1 or 0) * window_us
  expires = count > capacity and closes == finish and following or ends_us
else
  ends_us = start + (count > capacity and ceil(count / capacity) or 1) * window_us
  expires = ends_us
end

--- terms
-- The count that the charge leaves, and what a window pays.
count, capacity, 0

--- give
-- A charge of a past window counts in the state of that window. In a later one it counts less what
-- each window since may have paid of it, under either limit, and what passes the most that this one
-- counts.
local since
if not made then
  -- It is no reservation.
elseif not earlier then
  local window = made - made % window_us
  if window ~= begun then since = floor((start - window) / window_us) end
elseif made < begun or made >= ended then
  -- Before a clock that went back, the script knows no windows.
  since = made < start and ((start >= finish or made < earlier) and 2 or 1) or made < finish and 0 or -1
end
if since then
  local terms = reservation and reservation.terms or { 0, 0, 0 }
  local paid, lost = since * math.max(terms[2], capacity), math.max(terms[1] - most, 0)
  charge = since < 0 and 0 or math.max(charge - paid - lost, 0)
end

--- carry
-- The change counts in the window as it was written: another limit may count more in it, or be owed
-- for longer. Only a count that this limit could not read begins anew in the current window.
if held > 0 then
  local counts = after > used and held + after - used or held - charge
  if counts < 0 then counts = 0 end
  local capped, before = counts < most and counts or most, held < most and held or most
  local own_us = ended or begun + window_us
  local gone_us = own_us + (capped > capacity and ceil(capped / capacity) - 1 or 0) * window_us
  local own = held <= most
    and written_us == own_us + (before > capacity and ceil(before / capacity) - 1 or 0) * window_us
  if not own then
    -- A charge of a later window of this limit counts there, and for the other limit still in its
    -- own.
    if after <= used or start < begun then start = begun end
    count, ends_us = math.min(counts, 2^52 - 1), capped > capacity and math.max(written_us, gone_us) or written_us
    expires = ends_us
  elseif counts <= most then
    start, count, ends_us = begun, counts, gone_us
    expires = ends_us
    if earlier and count > capacity then
      expires = ended == current and finish or ended == finish and following or ends_us
    end
  end
end
gone = count == 0 or ends_us <= now
