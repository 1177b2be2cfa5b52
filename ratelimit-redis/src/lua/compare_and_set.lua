-- Compare-and-set: writes several keys if none has changed since it was read, for algorithms
-- stepped in Rust.
--
--     KEYS: the keys, each once; then those of records (premises.lua).
--     ARGV: the time (begin.lua), by which records end; what is assumed about records; and five
--           per key: '1' and the value that was read, or '0' and any text if there was none; the
--           change: '' or 'put' or 'remove'; the value and its time to live in ms.
--
-- Returns 1; or 0 if a key has changed, or what premises.lua answers, and nothing was written.

--[[begin]]
--[[premises]]
for i = first0, #ARGV, 5 do
  local read = ARGV[i] == '1' and ARGV[i + 1]
  if call('GET', KEYS[(i - first0) / 5 + 1]) ~= read then return '0' end
end
for i = first0, #ARGV, 5 do
  local key, change = KEYS[(i - first0) / 5 + 1], ARGV[i + 2]
  if change == 'put' then
    call('SET', key, ARGV[i + 3], 'PX', ARGV[i + 4])
  elseif change == 'remove' then
    call('DEL', key)
  end
end
return '1'
