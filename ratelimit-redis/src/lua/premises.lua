-- Compares what the request assumes about the records of its callers with what stands, before
-- anything is read or written. If one differs, the script charges nothing and answers all of them:
-- the time, a line with `~`, and each record as its length, a colon and its bytes.
--
--     ARGV, behind the time: how many, and for each its KEY (an index), FIELD, RECORD and END:
--           the record's bytes, empty for none; and if it ends, when, with a sign before it if the
--           request assumes that it has ended.
do
  local args, next = ARGV, first0 + 1
  local differs, answer = false, time0 .. '~\n'
  for _ = 1, args[first0] + 0 do
    local stands = call('HGET', KEYS[args[next] + 0], args[next + 1]) or ''
    local ends = args[next + 3]
    if stands ~= args[next + 2] then
      differs = true
    elseif ends ~= '' then
      ends = ends + 0
      if ends < 0 and now < -ends or ends >= 0 and now >= ends then differs = true end
    end
    answer, next = answer .. #stands .. ':' .. stands, next + 4
  end
  if differs then return answer end
  first0 = next
end
