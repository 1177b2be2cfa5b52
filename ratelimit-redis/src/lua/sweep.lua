-- Removes what has ended from a hash: the fields of limits that no one uses any more, which an
-- active caller would otherwise keep for ever. README.md beside this file says when. Every field
-- ends with the time in milliseconds until which its key was kept for it; 0 if that is not known.
--
-- It has the `key`, how many `fields` were written, and in `life_ms` and `ttl_ms` how long the key
-- had to live and now has. It may fail: the next one removes the rest.

if life_ms >= 0 and floor((now / 1000 + life_ms) / 2^22) < floor((now / 1000 + ttl_ms) / 2^22) then
  local count = pcall0('HLEN', key)
  local all = type(count) == 'number' and count > fields and pcall0('HGETALL', key) or {}
  for place = 2, #all, 2 do
    local kept = #all[place] >= 7 and unpack0('<I7', string.sub(all[place], -7)) or 0
    if kept > 0 and kept * 1000 < now then pcall0('HDEL', key, all[place - 1]) end
  end
end
