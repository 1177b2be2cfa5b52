-- The table of a twin in sections, for the driver. `cost_unit` is how many internal units there are
-- per unit of cost.
local function parsed0(seen)
  local name0, kept0, --[[state]]
  if #seen == --[[bytes]] then name0, --[[state]], kept0 = unpack0('--[[format]]', seen) end
  if not (name0 == '--[[name]] ' and --[[valid]]) then error(CORRUPT) end
  return kept0, --[[state]]
end
return of_numbers({ 'cost_unit', --[[names]] }, function(seen)
  local kept0, --[[state]] = parsed0(seen)
  return --[[mark]]
end, function(limit, seen, operation, charge, made, reservation)
  local --[[parameters]], cost_unit = --[[limits]], limit.cost_unit
  local kept0, --[[state]]
  if seen then
    kept0, --[[state]] = parsed0(seen)
  else
    --[[fresh]]
  end
  local at = now
  --[[level]]
  local after, expires = used + charge
  if operation == 'give' or operation == 'undo' or operation == 'left' then
    --[[give]]
    if operation == 'left' then return floor((used > charge and charge or used) / cost_unit) end
    after = used > charge and used - charge or 0
  elseif operation == 'fill' and after > capacity then
    --[[fill]]
  elseif operation == 'force' then
    if after > --[[most]] then after = used > --[[most]] and used or --[[most]] end
  elseif charge > 0 and after > capacity then
    return false, nil, nil, nil, at
  end
  if after == used then return true, nil, nil, nil, at end
  local gone = after == 0
  if gone and not --[[carries]] then return true, 'remove', nil, nil, at end
  --[[move]]
  if operation ~= 'acquire' then
    --[[carry]]
  end
  if gone then return true, 'remove', nil, nil, at end
  kept0 = kept_ms(state_ttl_ms(expires))
  return true, 'put', pack0('--[[format]]', '--[[name]] ', --[[state]], kept0), expires, at, --[[terms]]
end, --[[settles]], --[[keeps_terms]])
