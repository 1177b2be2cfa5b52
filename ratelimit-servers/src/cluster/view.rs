//! One node's view of the cluster: `CLUSTER NODES`.

/// The cluster as one node sees it.
pub(super) struct ClusterView {
    nodes: Vec<NodeView>,
}

/// A node as one of them sees it.
pub(super) struct NodeView {
    id: String,
    flags: Vec<String>,
    /// The id of its master, if it is a replica.
    pub(super) master: Option<String>,
    /// The configuration epoch of its slots.
    pub(super) epoch: u64,
    linked: bool,
    pub(super) slots: Slots,
    /// The slots that it is migrating, with their targets. A node reports only its own.
    leaving: Vec<(u16, String)>,
}

/// Slots, as inclusive ranges.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Slots(Vec<(u16, u16)>);

impl Slots {
    pub(super) fn contains(&self, slot: u16) -> bool {
        self.0.iter().any(|(first, last)| (*first..=*last).contains(&slot))
    }

    pub(super) fn len(&self) -> usize {
        self.0.iter().map(|(first, last)| usize::from(last - first) + 1).sum()
    }
}

impl ClusterView {
    pub(super) fn node(&self, id: &str) -> Option<&NodeView> {
        self.nodes.iter().find(|node| node.id == id)
    }

    /// Checks that this view of a node agrees with the node's own, and that the node is connected.
    pub(super) fn agrees(&self, own: &NodeView) -> Result<(), String> {
        let id = &own.id;
        let Some(seen) = self.node(id) else { return Err(format!("does not know {id}")) };
        let ill = ["handshake", "noaddr", "fail", "fail?"];
        if let Some(flag) = seen.flags.iter().find(|flag| ill.contains(&flag.as_str())) {
            return Err(format!("{id} is marked {flag}"));
        }
        if !seen.linked {
            return Err(format!("not connected to {id}"));
        }
        if (&seen.master, &seen.slots) != (&own.master, &own.slots) {
            let (theirs, its) = (seen.slots.len(), own.slots.len());
            return Err(format!(
                "takes {id} for a replica of {:?} with {theirs} slots, not of {:?} with {its}",
                seen.master, own.master
            ));
        }
        Ok(())
    }
}

impl NodeView {
    pub(super) fn is_master(&self) -> bool {
        self.master.is_none()
    }

    /// The id of the node to which this slot is migrating.
    pub(super) fn hands_over(&self, slot: u16) -> Option<&str> {
        let mut leaving = self.leaving.iter();
        leaving.find(|(moving, _)| *moving == slot).map(|(_, to)| to.as_str())
    }
}

/// Parses the reply to `CLUSTER NODES`: one line per node.
pub(super) fn parse(reply: &str) -> Result<ClusterView, String> {
    let nodes = reply.lines().filter(|line| !line.is_empty());
    let nodes = nodes.map(|line| read_node(line).ok_or_else(|| format!("not a node: {line:?}")));
    Ok(ClusterView { nodes: nodes.collect::<Result<_, _>>()? })
}

/// `id address flags master ping-sent pong-received epoch link-state slot…`
fn read_node(line: &str) -> Option<NodeView> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let [id, _address, flags, master, _sent, _received, epoch, state, slots @ ..] = &words[..]
    else {
        return None;
    };
    let mut node = NodeView {
        id: (*id).to_owned(),
        flags: flags.split(',').map(str::to_owned).collect(),
        master: (*master != "-").then(|| (*master).to_owned()),
        epoch: epoch.parse().ok()?,
        linked: *state == "connected",
        slots: Slots::default(),
        leaving: Vec::new(),
    };
    for word in slots {
        if let Some(moving) = word.strip_prefix('[') {
            // `[93->-id]` is migrating, `[77-<-id]` is importing.
            if let Some((slot, to)) = moving.trim_end_matches(']').split_once("->-") {
                node.leaving.push((slot.parse().ok()?, to.to_owned()));
            }
        } else {
            let (first, last) = word.split_once('-').unwrap_or((word, word));
            node.slots.0.push((first.parse().ok()?, last.parse().ok()?));
        }
    }
    Some(node)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn a_node_is_read_with_its_slots_and_those_that_move() {
        let view = parse(
            "aa 127.0.0.1:1@2,,tls-port=0,shard-id=x myself,master - 0 17 3 connected 0-2 7 [7->-bb] [9-<-bb]\n\
             bb 127.0.0.1:3@4 slave,fail aa 0 17 3 disconnected\n",
        )
        .unwrap();
        let (first, second) = (view.node("aa").unwrap(), view.node("bb").unwrap());
        assert!(first.is_master() && first.slots.contains(2) && first.slots.contains(7));
        assert_eq!((first.slots.len(), first.epoch), (4, 3));
        assert_eq!((first.hands_over(7), first.hands_over(9)), (Some("bb"), None));
        assert_eq!(second.master.as_deref(), Some("aa"));
        assert!(view.agrees(first).is_ok());
        assert_eq!(view.agrees(second), Err("bb is marked fail".to_owned()));
        assert!(parse("aa 127.0.0.1:1@2 master\n").is_err());
    }
}
