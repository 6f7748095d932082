document.querySelectorAll('.cudatma-map').forEach(function(map){
  function mark(event,on){var cell=event.target.closest('[data-key]');if(!cell)return;
    map.querySelectorAll('[data-key="'+cell.dataset.key+'"]').forEach(function(twin){twin.classList.toggle('hot',on)})}
  map.addEventListener('mouseover',function(event){mark(event,true)});
  map.addEventListener('mouseout',function(event){mark(event,false)})})
