//! What documents say of the algorithms is what the laws try.

use ratelimit_testkit::AlgorithmKind;

#[test]
fn the_readme_says_what_works_where() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../README.md");
    let readme = std::fs::read_to_string(path).expect("the README of the project");
    for kind in AlgorithmKind::ALL {
        let tick = |kinds: &[AlgorithmKind]| if kinds.contains(&kind) { "✓" } else { "–" };
        let multi = if AlgorithmKind::INCREMENT_FIRST.contains(&kind) { "attempts" } else { "–" };
        let (attempts, reserved) =
            (tick(&AlgorithmKind::ATTEMPTS), tick(&AlgorithmKind::RESERVATIONS));
        let row = format!("| `{kind}` | ✓ | ✓ | ✓ | {multi} | {attempts} | {reserved} |\n");
        assert!(readme.contains(&row), "the README has no row\n{row}");
    }
}
