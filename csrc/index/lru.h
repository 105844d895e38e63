// Intrusive doubly linked lists over entries (paper 4.3): O(1) touch, removal and victim.
#pragma once

#include <cstdint>

#include "index/types.h"

namespace mtserve {

struct LruLink {
  EntryId colder = kNoEntry;
  EntryId hotter = kNoEntry;
};

// `Nodes` gives access to the link and the last-use tick of an entry:
//   LruLink& link(EntryId), uint64_t tick(EntryId).
template <class Nodes>
class LruList {
 public:
  EntryId coldest() const { return coldest_; }
  bool empty() const { return coldest_ == kNoEntry; }

  // Keeps the list ordered by tick. Entries come back near the end they left, so the search from both ends is
  // short; it is bounded all the same, because an order that is a little off costs less than a long walk.
  void insert(Nodes& nodes, EntryId id) {
    const uint64_t tick = nodes.tick(id);
    EntryId hot = hottest_, cold = coldest_;
    for (int step = 0; step < kMaxWalk && hot != kNoEntry; ++step) {
      if (nodes.tick(hot) <= tick) return link_between(nodes, hot, nodes.link(hot).hotter, id);
      if (nodes.tick(cold) >= tick) return link_between(nodes, nodes.link(cold).colder, cold, id);
      hot = nodes.link(hot).colder;
      cold = nodes.link(cold).hotter;
    }
    link_between(nodes, hot, hot == kNoEntry ? coldest_ : nodes.link(hot).hotter, id);
  }

  void remove(Nodes& nodes, EntryId id) {
    LruLink& link = nodes.link(id);
    (link.colder == kNoEntry ? coldest_ : nodes.link(link.colder).hotter) = link.hotter;
    (link.hotter == kNoEntry ? hottest_ : nodes.link(link.hotter).colder) = link.colder;
    link = LruLink{};
  }

 private:
  static constexpr int kMaxWalk = 64;

  void link_between(Nodes& nodes, EntryId colder, EntryId hotter, EntryId id) {
    nodes.link(id) = LruLink{colder, hotter};
    (colder == kNoEntry ? coldest_ : nodes.link(colder).hotter) = id;
    (hotter == kNoEntry ? hottest_ : nodes.link(hotter).colder) = id;
  }

  EntryId coldest_ = kNoEntry;
  EntryId hottest_ = kNoEntry;
};

}  // namespace mtserve
