//! Rules about modules, which `ARCHITECTURE.md` states: each uses only those before it, and no
//! algorithm another.

use crate::{File, assert_none, files, read, words};

/// The folders of the crates' sources, and the words after which `ARCHITECTURE.md` lists the
/// modules.
const CORE: (&str, &str) =
    ("ratelimit-core/src/", "Inside core each file imports only from those before it:");
const REDIS: (&str, &str) = ("ratelimit-redis/src/", "each module uses only those before it:");
const CONNECTION: (&str, &str) = (
    "ratelimit-redis/src/connection/",
    "Inside `connection/` each file uses only those before it:",
);
const LAYERS: (&str, &str) =
    ("ratelimit-layers/src/", "Inside layers each file uses only those before it:");
const REPLAY: (&str, &str) =
    ("ratelimit-replay/src/", "Inside replay each file uses only those before it:");
const TOOL: (&str, &str) =
    ("ratelimit-cli/src/", "Inside the tool each file uses only those before it:");
const ALGORITHMS: &str = "ratelimit-core/src/algorithms/";

/// The modules of a crate, in order. A folder's files stand where its module does, unless the
/// folder, with a slash, has a place of its own.
struct Layers {
    /// The folder of the crate's sources, or that of a module.
    root: &'static str,
    /// The path of the root in code, such as `crate::`.
    inside: String,
    order: Vec<String>,
    /// What the root file defines itself, for all modules.
    common: Vec<String>,
}

/// The files of a crate's root.
const ROOTS: [&str; 2] = ["lib.rs", "main.rs"];

/// The modules after this path that a line uses. What a macro names by `$crate` is used where the
/// macro is.
fn uses<'l>(line: &'l str, path: &str) -> impl Iterator<Item = &'l str> {
    let paths = line.match_indices(path).filter(|(at, _)| !line[..*at].ends_with('$'));
    paths.flat_map(move |(at, found)| {
        let rest = line[at + found.len()..].split(path).next().unwrap_or_default();
        let all = rest.strip_prefix('{').unwrap_or(rest.split(',').next().unwrap_or_default());
        all.split(',').filter_map(|one| words(one).next())
    })
}

/// What a line of a root file defines, unless it is a module.
fn definition(line: &str) -> Option<String> {
    let line = line.strip_prefix("pub ").unwrap_or(line);
    let line = ["fn ", "struct ", "trait "].iter().find_map(|kind| line.strip_prefix(kind))?;
    words(line).next().map(str::to_owned)
}

impl Layers {
    fn listed((root, after): (&'static str, &str)) -> Self {
        let text = read("ARCHITECTURE.md");
        let (_, rest) = text.split_once(after).expect("ARCHITECTURE.md lists the modules");
        let names = rest.split('.').next().unwrap_or_default().split('`').skip(1).step_by(2);
        let module = format!("{}.rs", root.trim_end_matches('/'));
        let roots = ROOTS.map(|name| format!("{root}{name}")).into_iter().chain([module]);
        let common: Vec<_> = roots.map(|path| File::new(&path, &read(&path))).collect();
        let common = common.iter().flat_map(|file| file.code().filter_map(|(_, l)| definition(l)));
        let (_, folders) = root.split_once("/src/").unwrap_or_default();
        let inside = format!("crate::{}", folders.replace('/', "::"));
        let order = names.map(str::to_owned).collect();
        Self { root, inside, order, common: common.collect() }
    }

    /// The place of a file or a module, by its path below the root.
    fn position(&self, path: &str) -> Option<usize> {
        let name = path.strip_suffix(".rs").unwrap_or(path);
        let position = |name: &str| self.order.iter().position(|layer| *layer == name);
        match name.split_once('/') {
            Some((folder, _)) => position(&format!("{folder}/")).or_else(|| position(folder)),
            None => position(name),
        }
    }

    /// Uses of a module that stands after the one that uses it.
    fn upward(&self, file: &File) -> Vec<String> {
        let path = &file.path;
        let name = path.trim_start_matches(self.root);
        // What stands directly in the folder also finds its siblings there.
        let paths =
            [&*self.inside, "super::"].into_iter().take(1 + usize::from(!name.contains('/')));
        let Some(own) = self.position(name) else {
            return vec![format!("{path}: give its module a place in ARCHITECTURE.md")];
        };
        let mut found = Vec::new();
        for (number, line) in file.code() {
            let used = paths.clone().flat_map(|path| uses(line, path));
            for used in used.filter(|used| !self.common.iter().any(|own| own == used)) {
                if self.position(used).is_none_or(|used| used > own) {
                    found.push(format!("{path}:{number}: `{used}` is no layer before its own"));
                }
            }
        }
        found
    }
}

/// The algorithm that a file belongs to: a folder holds the parts of the algorithm of its name.
fn algorithm_of(file: &File) -> &str {
    file.path.trim_start_matches(ALGORITHMS).split(['/', '.']).next().unwrap_or_default()
}

/// What others could name of an algorithm's file: its module and its public types.
fn names(file: &File) -> impl Iterator<Item = &str> {
    let public = file.code().filter_map(|(_, line)| {
        let line = line.strip_prefix("pub struct ").or(line.strip_prefix("pub enum "))?;
        words(line).next()
    });
    public.chain([algorithm_of(file)])
}

/// Uses of one algorithm's file by another.
fn siblings(algorithms: &[File]) -> impl Iterator<Item = String> {
    algorithms.iter().flat_map(|file| {
        let others = algorithms.iter().filter(|other| algorithm_of(other) != algorithm_of(file));
        let names: Vec<_> = others.flat_map(names).collect();
        let used = file.code().flat_map(|(_, line)| words(line));
        let used = used.filter(move |word| names.contains(word));
        used.map(|name| format!("{}: `{name}` of another algorithm", file.path))
    })
}

#[test]
fn the_arrows_between_modules_point_one_way() {
    for layers in [CORE, REDIS, CONNECTION, LAYERS, REPLAY, TOOL].map(Layers::listed) {
        let mut files = files(layers.root, &["rs"]);
        files.retain(|file| !ROOTS.contains(&file.path.trim_start_matches(layers.root)));
        assert_none(files.iter().flat_map(|file| layers.upward(file)));
        let modules = layers.order.iter().map(|layer| format!("{}{layer}", layers.root));
        let missing = modules.filter(|path| !files.iter().any(|f| f.path.starts_with(path)));
        assert_none(missing.map(|path| format!("ARCHITECTURE.md: {path} is no module")));
    }
}

#[test]
fn no_algorithm_knows_another() {
    let algorithms = files(ALGORITHMS, &["rs"]);
    assert!(algorithms.len() >= 5, "the algorithms are in {ALGORITHMS}");
    assert_none(siblings(&algorithms));
}

#[test]
fn each_rule_finds_what_breaks_it() {
    let core = |name: &str, text: &str| File::new(&format!("{}{name}", CORE.0), text);
    let [layers, redis, around] = [CORE, REDIS, LAYERS].map(Layers::listed);
    let upward = |name: &str, text: &str| layers.upward(&core(name, text)).len();
    assert_eq!(upward("algorithms.rs", "use crate::limit::Limit;"), 1);
    assert_eq!(upward("algorithms/gcra.rs", "use crate::any_algorithm::AnyAlgorithm;"), 1);
    assert_eq!(upward("unknown.rs", ""), 1);
    assert_eq!(upward("algorithms/gcra.rs", "use crate::algorithms::Step; // crate::policy"), 0);
    assert_eq!(upward("limit.rs", "mod tests {\n    use crate::store_traits::Store;\n}"), 0);
    let file = File::new(&format!("{}url/options.rs", REDIS.0), "use crate::store::RedisStore;");
    assert_eq!(redis.upward(&file).len(), 1);
    let connection = Layers::listed(CONNECTION);
    for (name, text, due) in [
        ("link.rs", "use super::attempts::Attempts;", 0),
        ("link.rs", "use super::Connection;", 0),
        ("attempts.rs", "use super::link::Link;", 1),
        ("node/fred.rs", "use super::Settings;", 0),
        ("node/fred.rs", "use crate::connection::servers::Servers;", 1),
    ] {
        let file = File::new(&format!("{}{name}", CONNECTION.0), text);
        assert_eq!(connection.upward(&file).len(), due, "{name}: {text}");
    }
    for (text, due) in [
        ("use crate::{OnDrop, lock};", 0),
        ("use crate::{lock, fallback};", 1),
        ("use crate::fallback::{Fallback, lock};", 1),
    ] {
        let file = File::new(&format!("{}metrics.rs", LAYERS.0), text);
        assert_eq!(around.upward(&file).len(), due, "{text}");
    }

    let gcra = || core("algorithms/gcra.rs", "pub struct Gcra {");
    let uses = |name: &str, text: &str| siblings(&[gcra(), core(name, text)]).count();
    assert_eq!(uses("algorithms/other.rs", "use crate::algorithms::{Gcra, Step};"), 1);
    assert_eq!(uses("algorithms/other.rs", "use super::gcra;"), 1);
    assert_eq!(uses("algorithms/other.rs", "/// Like [`Gcra`](crate::Gcra)."), 0);
    assert_eq!(uses("algorithms/gcra/fast.rs", "use super::gcra;"), 0);
}
