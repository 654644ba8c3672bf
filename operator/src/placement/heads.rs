//! Heads: each node leads about the same number of chains, for the head carries the writes.

/// Orders each group so that heads are spread evenly: a matching of groups to members in which
/// nobody leads more than the average, rounded up. One exists because every node is in about as
/// many groups as any other.
pub(super) fn deal(groups: &[Vec<usize>], nodes: usize) -> Vec<Vec<usize>> {
    let mut matching = Matching { groups, share: 0, led: vec![Vec::new(); nodes] };
    let mut waiting: Vec<usize> = (0..groups.len()).collect();
    // One more for everybody at a time, so that nobody leads two more than another needs to.
    while !waiting.is_empty() && matching.share < groups.len() {
        matching.share += 1;
        waiting.retain(|group| !matching.place(*group, &mut vec![false; nodes]));
    }
    let mut ordered: Vec<Vec<usize>> = groups.to_vec();
    for (node, led) in matching.led.iter().enumerate() {
        for group in led {
            let members = &mut ordered[*group];
            if let Some(at) = members.iter().position(|n| *n == node) {
                members.rotate_left(at);
            }
        }
    }
    ordered
}

struct Matching<'a> {
    groups: &'a [Vec<usize>],
    share: usize,
    /// The groups that each node leads.
    led: Vec<Vec<usize>>,
}

impl Matching<'_> {
    /// Finds a leader for `group`, moving other groups to other leaders where that makes room.
    /// `asked` are the nodes that were tried already.
    fn place(&mut self, group: usize, asked: &mut [bool]) -> bool {
        let groups = self.groups;
        for node in groups[group].iter().copied() {
            if std::mem::replace(&mut asked[node], true) {
                continue;
            }
            if self.led[node].len() < self.share {
                self.led[node].push(group);
                return true;
            }
            for i in 0..self.led[node].len() {
                let other = self.led[node][i];
                if self.place(other, asked) {
                    self.led[node][i] = group;
                    return true;
                }
            }
        }
        false
    }
}
