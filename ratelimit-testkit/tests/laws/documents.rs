//! What documents say of the algorithms is what the laws try.

use ratelimit_testkit::AlgorithmKind;

#[test]
fn the_guide_says_what_works_where() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/guide/src/algorithms.md");
    let chapter = std::fs::read_to_string(path).expect("the chapter of the guide");
    for kind in AlgorithmKind::ALL {
        let tick = |kinds: &[AlgorithmKind]| if kinds.contains(&kind) { "✓" } else { "–" };
        let multi = tick(&AlgorithmKind::INCREMENT_FIRST);
        let (attempts, reserved) =
            (tick(&AlgorithmKind::ATTEMPTS), tick(&AlgorithmKind::RESERVATIONS));
        let row = format!("| `{kind}` | {multi} | {attempts} | {reserved} |\n");
        assert!(chapter.contains(&row), "the chapter has no row\n{row}");
    }
}
