-- A twin in sections whose state has variable length, in the driver.

-- What stands in a field as text behind a name, and until when its key is kept.
local function text_of(name)
  local stored = call('HGET', key0, field0)
  if not stored then return nil, 0 end
  if #stored < #name + 8 or string.sub(stored, 1, #name + 1) ~= name .. ' ' then error(CORRUPT0) end
  return string.sub(stored, 1, -8), unpack0('<I7', string.sub(stored, -7))
end

-- Binary search: the first number from `low` on for which `holds`, which once true stays true;
-- `high` if there is none. It is often the first.
local function first_for(low, high, holds)
  if low < high and holds(low) then return low end
  low = low + 1
  while low < high do
    local middle = floor((low + high) / 2)
    if holds(middle) then high = middle else low = middle + 1 end
  end
  return high
end

-- All that fits, and what is left of it.
local at, used, most, left, kept0 = now, 0, MOST, MOST, 0
local charge, text, expires = charge0, nil, nil
--[[fresh]]
if act0 ~= 'full' then
  --[[read]]
end
--[[level]]
if shows0 then
  local seen = ''
  --[[seen]]
  show0(seen, #seen .. ':')
end
if left0 and left < (left0[given0] or left + 1) then left0[given0] = left end
if act0 == 'force' then
  act0, charge = 'acquire', math.min(charge, left)
elseif act0 == 'extend' and charge > left then
  fits0, act0 = false, nil
elseif act0 == 'acquire' and charge > left then
  fits0, act0, charge = false, 'fill', attempts0 and math.min(charge, most) or 0
  if not --[[fills]] then act0, charge = 'acquire', math.min(charge, left) end
end
if act0 and charge > 0 then
  if act0 == 'undo' then
    --[[undo]]
  end
  if act0 == 'give' then
    if used > 0 then wrote0 = charge < used and 'put' or 'remove' end
    if wrote0 == 'put' then
      --[[give]]
    end
  elseif act0 == 'settle' or act0 == 'renew' then
    wrote0 = 'put'
    --[[renew]]
  elseif act0 == 'fill' then
    wrote0 = 'put'
    --[[fill]]
  elseif act0 then
    wrote0 = 'put'
    --[[charge]]
  end
  if wrote0 == 'remove' then
    command(--[[removing]])
  elseif text then
    --[[keep]]
    put0(key0, field0, text .. pack0('<I7', kept0), ttl0)
  elseif expires then
    due0 = due0 or {}
    due0[last0] = math.max(ceil((expires - now + 20000) / 1000), 1) + (padding_ms or 0)
    -- A later charge counts for longer.
    if act0 and act0 ~= 'give' and not padding_ms then
      surely0 = surely0 or {}
      surely0[last0] = true
    end
  end
end
