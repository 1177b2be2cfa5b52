//! `ratelimit reset`: forgets a caller.

use ratelimit_core::Op;

use crate::args::ResetArgs;
use crate::caller::Caller;
use crate::decision_line::{string, write_caller};
use crate::failure::Failure;
use crate::policy;
use crate::store::{self, Keys, Secret, StoreUrl};

pub(super) fn run(args: &ResetArgs) -> Result<u8, Failure> {
    let limits = policy::read(&args.caller.policy)?;
    let address = StoreUrl::lasting(&args.store, "reset")?;
    let caller = Caller::from_args(&args.caller.keys, &limits)?;
    let secret = Secret::find(args.caller.secret_file.as_deref())?;
    let keys = Keys { prefix: &args.caller.prefix, secret: secret.as_ref() };
    let keyed = caller.keys(&limits);
    let _ = super::block_on(async {
        let store = store::connect(&address, keys, &limits).await?;
        let what = format!("--store {address}");
        store.apply_to(&keyed, Op::Reset, 1).await.map_err(|error| Failure::store(&what, &error))
    })?;
    let names: Vec<&str> = keyed.iter().map(|(limit, _)| limit.name()).collect();
    let out = if args.caller.json {
        json(&caller, &names)
    } else {
        format!("{}: full capacity again in {}\n", caller.display(), names.join(", ")).into_bytes()
    };
    super::print(&out)?;
    Ok(0)
}

fn json(caller: &Caller<'_>, names: &[&str]) -> Vec<u8> {
    let mut out = vec![b'{'];
    write_caller(&mut out, caller);
    out.extend_from_slice(b"\"reset\":[");
    for (place, name) in names.iter().enumerate() {
        if place > 0 {
            out.push(b',');
        }
        string(&mut out, name);
    }
    out.extend_from_slice(b"]}\n");
    out
}
