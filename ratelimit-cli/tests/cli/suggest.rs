//! `suggest`: the policy that it writes. What it proposes, the oracle checks.

use crate::common::{Scene, example};

#[test]
fn the_written_policy_has_the_proposed_limits_and_all_else_as_it_was() {
    let (policy, log) = example();
    let policy = policy.replace("rate      = \"2/s\"\nburst     = 40", "rate = '2/s' # slow");
    let inline = "limit = [{ name = \"a\", algorithm = \"gcra\", rate = \"5/s\" }]\n";
    let scene = Scene::new(&policy);
    scene.write("inline.toml", inline);
    let suggest = ["suggest", "--target", "1%", "--write"];
    let ran = |more: &[&str]| scene.run(&[&suggest[..], more].concat());
    ran(&["out.toml", "--policy", "policy.toml", &log]).exits(0);
    let due = policy.replace("= 30", "= 5").replace("25/m", "3/m").replace("650/d", "170/d");
    assert_eq!(scene.read("out.toml"), due.replace("'2/s' #", "'2/s'\nburst = 84 #"));
    ran(&["inline-out.toml", "--policy", "inline.toml", &log]).exits(0);
    assert_eq!(scene.read("inline-out.toml"), inline.replace("\" }", "\", burst = 5 }"));
    // It overwrites nothing.
    ran(&["policy.toml", "--policy", "policy.toml", &log]).exits(2).says(&["policy.toml"]);
    assert_eq!(scene.read("policy.toml"), policy);
}
