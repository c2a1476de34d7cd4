-- The usage of callers, for the scripts that follow. KEYS[2]: when each counted key ends, in
-- milliseconds. KEYS[3]: the bytes of each, a space, and its owner. KEYS[4]: the sums, 'keys',
-- 'bytes' and 'callers' of the API, and 'k:' and 'b:' before each owner. A key that Redis deleted
-- with its TTL is subtracted by the next reservation, a hundred at a time.
local function count(owner, keys, bytes)
    local had = tonumber(redis.call('HGET', KEYS[4], 'k:' .. owner)) or 0
    local has = redis.call('HINCRBY', KEYS[4], 'k:' .. owner, keys)
    redis.call('HINCRBY', KEYS[4], 'b:' .. owner, bytes)
    redis.call('HINCRBY', KEYS[4], 'keys', keys)
    redis.call('HINCRBY', KEYS[4], 'bytes', bytes)
    if had <= 0 and has > 0 then
        redis.call('HINCRBY', KEYS[4], 'callers', 1)
    elseif had > 0 and has <= 0 then
        redis.call('HINCRBY', KEYS[4], 'callers', -1)
        redis.call('HDEL', KEYS[4], 'k:' .. owner, 'b:' .. owner)
    end
end

local function take_off(name)
    local noted = redis.call('HGET', KEYS[3], name)
    redis.call('ZREM', KEYS[2], name)
    redis.call('HDEL', KEYS[3], name)
    if noted then
        local bytes, owner = string.match(noted, '^(%d+) (.*)$')
        -- Not negated: Lua has a zero below zero, and Redis does not.
        count(owner, -1, 0 - tonumber(bytes))
    end
end

local function note(name, owner, bytes, ends_at, ttl)
    local noted = redis.call('HGET', KEYS[3], name)
    if noted then
        count(owner, 0, bytes - tonumber(string.match(noted, '^(%d+) ')))
    else
        count(owner, 1, bytes)
    end
    redis.call('HSET', KEYS[3], name, string.format('%.0f %s', bytes, owner))
    redis.call('ZADD', KEYS[2], string.format('%.0f', ends_at), name)
    for at = 2, 4 do
        if redis.call('PTTL', KEYS[at]) < ttl then
            redis.call('PEXPIRE', KEYS[at], string.format('%.0f', ttl))
        end
    end
end

-- Whether the owner has room for another key, or without max_keys for an answer. All callers together may
-- have 16 times as much; beyond that each has its fair share.
local function has_room(owner, max_keys, max_bytes)
    local sums = redis.call('HMGET', KEYS[4],
        'k:' .. owner, 'b:' .. owner, 'keys', 'bytes', 'callers')
    for at = 1, 5 do
        sums[at] = tonumber(sums[at]) or 0
    end
    local callers = math.max(sums[5] + (sums[1] > 0 and 0 or 1), 1)
    local function fits(own, all, most)
        return own < most and (all < 16 * most or (own + 1) * callers <= 16 * most)
    end
    return fits(sums[2], sums[4], max_bytes)
        and (not max_keys or fits(sums[1], sums[3], max_keys))
end

