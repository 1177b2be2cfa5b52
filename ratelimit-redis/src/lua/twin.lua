-- A twin in sections whose state is a few numbers, in the driver. `cost_unit` is how many internal
-- units there are per unit of cost.
local cost_unit = args0[next0 - 1] + 0
local stored0 = act0 ~= 'full' and call('HGET', key0, field0)
local --[[state]]
local kept0 = 0
if stored0 then
  local name0
  if #stored0 == --[[bytes]] then name0, --[[state]], kept0 = unpack0('--[[format]]', stored0) end
  if not (name0 == '--[[name]] ' and --[[valid]]) then error(CORRUPT0) end
else
  --[[fresh]]
  if act0 == 'full' then
    --[[full]]
  end
end
if shows0 then show0(stored0 or '', stored0 and '--[[bytes]]:' or '0:') end
if act0 or pass0 == 1 then
  local at = now
  --[[level]]
  local charge = charge0 * cost_unit
  local after, expires, gone = used + charge, nil, nil
  if act0 == 'extend' then
    if --[[keeps_terms]] then
      -- What the reservation still counts for, if its charge were given back.
      charge, made = reservation.counts * cost_unit, reservation.timestamp
      --[[give]]
      counts0 = floor((used > charge and charge or used) / cost_unit)
    end
    fits0 = after <= capacity
  elseif act0 == 'give' or act0 == 'undo' then
    --[[give]]
    after = used > charge and used - charge or 0
  elseif act0 == 'full' or act0 == 'force' then
    if act0 == 'full' or after > --[[most]] then after = used > --[[most]] and used or --[[most]] end
  elseif act0 and charge > 0 and after > capacity then
    fits0 = false
    after = used
    if attempts0 then
      act0, charge = 'fill', math.min(charge, capacity)
      after = used + charge
      if after > capacity then
        --[[fill]]
      end
    end
  elseif not act0 then
    local left = floor((capacity - used) / cost_unit)
    if left0 and left < (left0[given0] or left + 1) then left0[given0] = left > 0 and left or 0 end
    after = used
  end
  if (fits0 or act0 == 'fill') and after ~= used then
    gone = after == 0
    if not gone or --[[carries]] then
      --[[move]]
      if act0 ~= 'acquire' and act0 ~= 'extend' then
        --[[carry]]
      end
    end
    wrote0 = gone and 'remove' or 'put'
    if gone then
      command('HDEL', key0, field0)
    else
      terms0, mark0 = --[[terms]], --[[mark]]
      --[[keep]]
      put0(key0, field0, pack0('--[[format]]', '--[[name]] ', --[[state]], kept0), ttl0)
    end
  end
  at0 = at
end
