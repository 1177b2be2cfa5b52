-- Compare-and-set: writes several keys if none has changed since it was read, for algorithms
-- stepped in Rust.
--
--     KEYS: the keys, each once.
--     ARGV: five per key: '1' and the value that was read, or '0' and any text if there was none;
--           the change: '' or 'put' or 'remove'; the value and its time to live in ms.
--
-- Returns 1, or 0 if a key has changed and nothing was written.

for i, key in ipairs(KEYS) do
  local read = ARGV[5 * i - 4] == '1' and ARGV[5 * i - 3]
  if redis.call('GET', key) ~= read then return '0' end
end
for i, key in ipairs(KEYS) do
  local change = ARGV[5 * i - 2]
  if change == 'put' then
    redis.call('SET', key, ARGV[5 * i - 1], 'PX', ARGV[5 * i])
  elseif change == 'remove' then
    redis.call('DEL', key)
  end
end
return '1'
