//! `ratelimit reset`: forgets a caller.

use ratelimit_core::store::Op;

use crate::args::CallerArgs;
use crate::caller::Caller;
use crate::decision_line::caller_json;
use crate::failure::Failure;
use crate::policy;
use crate::store;

pub(super) fn run(args: &CallerArgs) -> Result<u8, Failure> {
    let limits = policy::read(&args.policy)?;
    let caller = Caller::from_args(&args.keys, &limits)?;
    let keyed = caller.keys(&limits);
    let _ = store::block_on(async {
        let (store, failed) = store::of_caller(args, "reset", &limits).await?;
        store::apply_to(&store, &keyed, Op::Reset, 1).await.map_err(failed)
    })?;
    let names: Vec<&str> = keyed.iter().map(|(limit, _)| limit.name()).collect();
    super::print(if args.json {
        caller_json(&caller, "reset", &names)
    } else {
        format!("{}: full capacity again in {}\n", caller.display(), names.join(", "))
    })
}
