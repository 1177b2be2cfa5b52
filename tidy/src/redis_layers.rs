//! Rules about the modules of the Redis store: which may use which.

use crate::layers::Layers;
use crate::{File, assert_none, files};

const REDIS: &str = "ratelimit-redis/src";

/// The modules of the store, in the order of the way of one check, from its end: each uses only those that stand
/// before it.
const LAYERS: Layers = Layers {
    root: REDIS,
    order: &[
        "error",
        "deadline",
        "shared_runtime",
        "client",
        "mode",
        "url",
        "connection",
        "key",
        "reservation",
        "codec",
        "native",
        "script",
        "program",
        "flat",
        "scripts",
        "turns",
        "rounds",
        "merge",
        "store",
        "builder",
        "lua_mode",
        "cas_mode",
        "multi_mode",
        "cross_slot",
        "apply",
        "scan",
        "heal",
        "health",
    ],
};

#[test]
fn the_arrows_of_the_redis_store_point_one_way() {
    let files = files(REDIS, &["rs"]);
    assert!(files.len() > LAYERS.order.len(), "the store is in {REDIS}");
    assert_none(
        files
            .iter()
            .filter(|file| file.path != format!("{REDIS}/lib.rs"))
            .flat_map(|file| LAYERS.upward(file)),
    );
}

#[test]
fn every_layer_has_its_file() {
    let files = files(REDIS, &["rs"]);
    let has_file =
        |layer: &&str| files.iter().any(|file| file.path == format!("{REDIS}/{layer}.rs"));
    let missing = LAYERS.order.iter().filter(|layer| !has_file(layer));
    assert_none(
        missing.map(|layer| format!("{REDIS}/{layer}.rs is missing: take it from the LAYERS")),
    );
}

#[test]
fn each_rule_finds_what_breaks_it() {
    let upward =
        |name: &str, text: &str| LAYERS.upward(&File::new(&format!("{REDIS}/{name}"), text)).len();
    assert_eq!(upward("url/options.rs", "use crate::store::RedisStore;"), 1);
    assert_eq!(upward("lua_mode.rs", "use crate::cross_slot::split;"), 1);
    assert_eq!(upward("store.rs", "use crate::builder::Builder; use crate::health::Health;"), 2);
    assert_eq!(upward("unknown.rs", ""), 1);
    assert_eq!(upward("url/options.rs", "use crate::mode::Lua; // crate::store"), 0);
    assert_eq!(upward("cross_slot/lua.rs", "use crate::lua_mode::call::Call;"), 0);
    assert_eq!(upward("flat.rs", "mod tests {\n    use crate::health::Health;\n}"), 0);
}
