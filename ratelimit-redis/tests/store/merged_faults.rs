//! What a script that decides merged requests may do wrong, and is caught at.

use crate::calls::{Wrong, decides_in_order};

#[test]
fn a_merged_script_with_a_fault_is_caught() {
    let faults: [(&str, Wrong); 16] = [
        ("one request more fits than does", |s| s.replace("= floor((cap", "= 1 + floor((cap")),
        ("more are charged than a run has", |s| s.replace("if room0 < fit0 then", "do")),
        ("each group charges the first key", |s| s.replace("key0 = key0 + many0", "key0 = 0")),
        ("the first run is forgotten", |s| s.replace("= runs0, f", "= runs0 + 1 + checks0, f")),
        ("a run is charged as one request", |s| s.replace("fit0 * args0", "args0")),
        ("only the last run is counted", |s| s.replace("admitted0 + fit0", "fit0")),
        ("the runs go in another order", |s| {
            s.replace("runs0, first0 - 1, 1 + c", "first0 - 1 - checks0, runs0, -1 - c")
        }),
        ("a request of another cost is charged as the first", |s| {
            s.replace("runs0 = args0, first0 + 1", "runs0 = args0, charge_single0")
        }),
        ("a request that just does not fit is charged", |s| {
            s.replace("not runs0 and after > capacity", "not runs0 and after > capacity + charge")
        }),
        ("one of several limits is enough", |s| {
            s.replace("not runs0 and after > c", "not runs0 and check0 == checks0 and after > c")
        }),
        ("the answers are shifted", |s| {
            let shifted = "table.insert(answers0, table.remove(answers0, 2))\nreturn table.concat";
            s.replace("return table.concat", shifted)
        }),
        ("each group has the numbers of the first", |s| {
            s.replace("local own0 = args0[first0]", "local own0 = args0[limits0]")
        }),
        ("a request with own numbers is charged as the first", |s| {
            s.replace("charges0, charge0 = numbers0, 0\n", "")
        }),
        ("the numbers of a group are read as its runs", |s| {
            s.replace("numbers0, 0\nfirst0 = first0 + 1", "numbers0, 0")
        }),
        ("one admitted request is not written", |s| s.replace("if put0 > 0", "if admitted0 > 1")),
        ("a state is read before an earlier group is written", |s| {
            let read = "pcall0('HGET', here0, args0[field0 + last0])";
            let memo = "memo0[here0 .. args0[field0 + last0]]";
            let s = s.replace(read, &format!("{memo} or {read}\n{memo} = found0"));
            s.replace("local keys0,", "local memo0 = {}\nlocal keys0,")
        }),
    ];
    let is_missed = |(_, wrong): &&(&str, Wrong)| decides_in_order(Some(*wrong), 192).is_ok();
    let missed: Vec<_> = faults.iter().filter(is_missed).map(|(fault, _)| fault).collect();
    assert!(missed.is_empty(), "not caught: {missed:?}");
}
